"""Prompt lookup: what followed the last n-gram when it stood before.

A. Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.samplers.drafting.contract import Drafter, Drafts, DraftSource, Frontier, OpenRun
from mmaccel.samplers.drafting.copying import tokens_at

_LONGEST = 3  # tokens of a suffix that is looked for


@dataclass(frozen=True)
class NGram(DraftSource):
    """The continuation of the last n-gram's most recent earlier occurrence, prompt included.

    Of a text a window is drafted anew in every pass; of slots with a layout those alone that no
    pass has predicted.
    """

    is_capturable = True
    reads_last_scores = False
    name = "ngram"

    def open(self, run: OpenRun) -> Drafter:
        """See `DraftSource.open`."""
        return Drafter(_OfText() if run.prompt.layout is None else self)

    def propose(self, frontier: Frontier) -> Drafts:
        return Drafts(_continue_ngram(frontier))


@dataclass(frozen=True)
class _OfText(NGram):
    keeps_predictions = False  # what stands behind a wrong draft is mostly wrong


def _continue_ngram(frontier: Frontier) -> Tensor:
    """`[B, K]`, what followed the most recent earlier occurrence of the longest suffix."""
    token_buffer = frontier.token_buffer
    filled = frontier.filled[:, None]
    index = torch.arange(token_buffer.shape[1], device=token_buffer.device)[None]  # [1, N]
    matched = torch.ones_like(token_buffer, dtype=torch.bool) & (index < filled - 1)
    best = torch.full_like(filled, -1)
    for n in range(_LONGEST):  # a constant number of comparisons of the whole buffer
        wanted = token_buffer.gather(1, (filled - 1 - n).clamp(min=0))
        matched = matched & (token_buffer.roll(n, 1) == wanted) & (index >= n) & (wanted >= 0)
        last = torch.where(matched, index, -1).amax(1, keepdim=True)
        best = torch.where(last >= 0, last, best)
    ahead = frontier.columns - filled  # [B, K], 0 is the first unknown column
    period = (filled - 1 - best).clamp(min=1)
    source = best + 1 + ahead.clamp(min=0) % period
    return tokens_at(frontier, torch.where(best >= 0, source, filled - 1))
