"""ADED: drafts by the tri-grams of the text so far, the candidates weighed by their counts.

X. Liu, B. Lei, R. Zhang, D. Xu, "Adaptive Draft-Verification for Efficient Large Language Model
Decoding", 2024 (arXiv 2407.12021): the output distribution is approximated by what followed the
last two tokens, and a search over it builds drafts that are likely and different.

Departures: the paper's matrix of tri-grams is prepared from a corpus and corrected; here counts are
those of the row's own text, the latest 16 occurrences. Where no pair recurs, the last token alone
is looked for. The paper searches by Monte Carlo; here a tree shape chooses nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmaccel.checks import within
from mmaccel.samplers.drafting.contract import Children, Drafter, OpenRun
from mmaccel.samplers.drafting.memory.candidates import (
    CandidateDrafter,
    CandidateSource,
    Contexts,
    own_text,
    vote,
)

_REACH = 2  # tokens before the one that is counted


@dataclass(frozen=True)
class ADED(CandidateSource):
    """What mostly followed the last two tokens in the row's own text, its prompt included.

    Args:
        occurrences: of the last two tokens that are counted, the latest ones.

    Loses: on images, at high temperatures; on texts that quote long passages, where `NGram` takes
    the longest match.
    Figures: `stdlib`, window 6, greedy: 3.61 tokens a pass.
    """

    occurrences: int = within(16, 1, 256, "16 suits most texts")

    name = "aded"

    def open(self, run: OpenRun) -> Drafter:
        return TrigramDrafter(self, reach=_REACH, occurrences=self.occurrences)


@dataclass(eq=False)
class TrigramDrafter(CandidateDrafter):
    occurrences: int

    def candidates(self, run: OpenRun, contexts: Contexts) -> Children:
        return vote(own_text(run), contexts, self.occurrences, run.vocab_size)
