"""Random tokens (Y. Teng et al., ICLR 2025, arXiv 2410.01699, section 3.3).

Departures: a random draft is recorded with its uniform distribution, not as one-hot; acceptance is
then 1 - TV(p, uniform) and not p(x).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.samplers.drafting.contract import Drafts, DraftSource, Frontier


@dataclass(frozen=True)
class Random(DraftSource):
    """Uniform over the tokens that may stand in a slot."""

    is_capturable = True
    reads_last_scores = False
    name = "random"

    def propose(self, frontier: Frontier) -> Drafts:
        return Drafts(scores=uniform_scores(frontier))


def uniform_scores(frontier: Frontier) -> Tensor:
    """Scores `[B, 1 or K, V]`: 0 for tokens that may stand in a slot, -inf for others."""
    allowed = frontier.layout.allowed(frontier.slots) if frontier.layout is not None else None
    scores = torch.zeros(
        frontier.vocab_size, device=frontier.token_buffer.device, dtype=torch.float32
    )
    if frontier.impossible is not None:
        scores.index_fill_(0, frontier.impossible.to(scores.device), float("-inf"))
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    batch = frontier.slots.shape[0]
    return scores.expand(batch, 1 if scores.ndim == 1 else frontier.slots.shape[1], -1)
