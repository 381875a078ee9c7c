"""Prompt lookup (A. Saxena, "Prompt Lookup Decoding", 2023)."""

from __future__ import annotations

from dataclasses import dataclass

from mmaccel.samplers.drafting.contract import Drafter, Drafts, DraftSource, Frontier, OpenRun
from mmaccel.samplers.drafting.copying import copy_on
from mmaccel.samplers.drafting.memory.candidates import find_suffix

_LONGEST = 3  # tokens of a suffix that is looked for


@dataclass(frozen=True)
class NGram(DraftSource):
    """The continuation of the last n-gram's most recent earlier occurrence, prompt included; of
    text anew in every pass, of slots with a layout only where no pass has predicted.

    Loses: on images, and where a text does not repeat itself.
    """

    is_capturable = True
    reads_last_scores = False
    name = "ngram"

    def open(self, run: OpenRun) -> Drafter:
        return Drafter(_OfText() if run.prompt.layout is None else self)

    def propose(self, frontier: Frontier) -> Drafts:
        filled = frontier.filled[:, None]
        first, _ = find_suffix(frontier.token_buffer, filled, _LONGEST)
        return Drafts(copy_on(frontier, first))


@dataclass(frozen=True)
class _OfText(NGram):
    keeps_predictions = False  # what stands behind a wrong draft is mostly wrong
