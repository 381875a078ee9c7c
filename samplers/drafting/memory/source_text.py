"""A given text as draft: what is edited, corrected or continued is mostly what was there.

T. Ge, H. Xia, X. Sun, S.-Q. Chen, F. Wei, "Lossless Acceleration for Seq2seq Generation with
Aggressive Decoding", 2022 (arXiv 2205.10350); X. Sun, T. Ge, F. Wei, H. Wang, "Instantaneous
Grammatical Error Correction with Shallow Aggressive Decoding", ACL 2021 (arXiv 2106.04970): the
input is verified as the output.

Departures: after a difference drafts go on at once, as if one token had been replaced by one, and
are realigned where the last tokens stand in the text: of several occurrences at the one nearest to
where the text was. The paper's suffix has to be unique, and decodes token by token until then.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmaccel.checks import within
from mmaccel.samplers.drafting.contract import Drafter, Drafts, DraftSource, OpenRun
from mmaccel.samplers.drafting.memory.candidates import Texts, find_contexts

if TYPE_CHECKING:
    from mmaccel.samplers.window.steps import Held

IDS = "give for example tokenizer(text).input_ids"
_REACH = 8  # the most tokens that are looked for


@dataclass(frozen=True)
class SourceText(DraftSource):
    """A text that all rows are expected to repeat, with changes.

    Args:
        tokens: its ids, of the model's own vocabulary.
        ngram: how many of the last tokens must stand in it to realign.

    Loses: on texts that are rearranged: a passage that moved is found only where its tokens are.
    """

    tokens: tuple[int, ...] = within(MISSING, hint=IDS, fewest=1, repr=False)
    ngram: int = within(2, 1, _REACH, "2 suits most texts")

    is_capturable = True
    keeps_predictions = False
    reads_last_scores = False

    def open(self, run: OpenRun) -> Drafter:
        device = run.prompt.tokens.device
        position = run.steps.declare("position in the source text")
        return SourceDrafter(self, ids_on(self.tokens, device), position, ngram=self.ngram)


@dataclass(eq=False)
class SourceDrafter(Drafter):
    ids: GivenIds
    position: Held  # [B] int64, where the row is in the text
    ngram: int

    @property
    def weights(self) -> object:
        return self.ids

    def propose(self, run: OpenRun) -> Drafts:
        rows = run.rows
        text = self.ids.tensor
        n_text = len(text)
        expected = self._position(run)
        back = torch.arange(_REACH, 0, -1, device=text.device)
        # only what the row has said is looked for
        columns = rows.columns[:, :1] - back  # [B, L]
        last = rows.tokens.gather(1, columns.clamp(min=0)).where(columns >= rows.origin, -1)
        column = torch.arange(n_text, device=text.device)
        distance = (column - expected[:, None]).abs()
        # the nearest to where the row is; of two as near the one behind it
        ranks = 2 * (n_text + expected[:, None] - distance) + (column >= expected[:, None])
        texts = Texts(text.expand(len(last), -1), column, ranks)
        indices, is_there, _ = find_contexts(texts, last[:, None], 1, self.ngram)
        position = indices[:, 0, 0].where(is_there[:, 0, 0], expected)
        self.position.hold(position)

        at = position[:, None] + torch.arange(run.width - 1, device=text.device)
        tokens = text[at.clamp(max=n_text - 1)].clamp(max=run.vocab_size - 1)
        return Drafts(tokens)

    def accepted(self, run: OpenRun, n_new: Tensor) -> None:
        self.position.hold(self._position(run) + n_new)

    def begin_rows(self, run: OpenRun, batch_slots: Tensor) -> None:
        if self.position.value is not None:
            self.position.get()[batch_slots] = 0

    def _position(self, run: OpenRun) -> Tensor:
        position = self.position.value
        return torch.zeros_like(run.rows.n_generated) if position is None else position


@dataclass(eq=False)
class GivenIds:
    """Ids on a device, which captured steps read."""

    tensor: Tensor  # [S] int64


@lru_cache(maxsize=8)
def ids_on(tokens: tuple[int, ...], device: torch.device) -> GivenIds:
    """Ids on a device, the same ones for another run, so that it may replay graphs of the first."""
    return GivenIds(torch.tensor(tokens, dtype=torch.int64, device=device))
