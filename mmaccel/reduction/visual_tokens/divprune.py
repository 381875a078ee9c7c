"""DivPrune: S. R. Alvar et al., CVPR 2025 (arXiv:2503.02175), algorithm 1: start with the token
whose nearest neighbour is farthest, then add the one farthest from all chosen ones, by cosine
distance.

Departures: rows of a batch are chosen together; distances below 1e-6 count as 0, so that equal
tokens are ordered by index in spite of rounding; for more than 16384 tokens the first one is the
farthest from the mean, because all pairs would not fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.reduction.visual_tokens.context import VisualContext
from mmaccel.reduction.visual_tokens.contract import TokenReducer
from mmaccel.reduction.visual_tokens.plan import Plan, keep_tokens
from mmaccel.reduction.visual_tokens.selection import unit

_PAIRS = 2**28  # distances held at once
_EQUAL = 1e-6


@dataclass(frozen=True)
class DivPrune(TokenReducer):
    """Keeps tokens far from each other. It reads no attention and no question: any encoder, and
    several questions may share an image.

    Cost: cosines of all pairs once and `[B, N]` work for each token kept.
    Loses: where an image has more different small things than the budget has places; noise is
    diverse, too.
    Figures: `scenes-vqa`, 22 % kept: 1.3 points lost of 97.0.
    """

    def select(self, scores: Tensor, context: VisualContext, budget: Tensor) -> Plan:
        valid = context.valid
        vectors = unit(context.x, context.valid)
        n = valid.shape[1]
        pairs = _distance(vectors @ vectors.mT) if len(valid) * n * n <= _PAIRS else None
        picks = budget.new_full((len(valid), int(budget.max())), -1)
        nearest = _start(vectors, pairs, valid).masked_fill(~valid, -2.0)  # -1: chosen
        for k in range(picks.shape[1]):
            pick = nearest.argmax(1, keepdim=True)  # the lowest index of equal ones
            picks[:, k : k + 1] = pick.where(k < budget[:, None], -1)
            index = pick[..., None].expand(-1, -1, n if pairs is not None else vectors.shape[2])
            if pairs is not None:
                distance = pairs.gather(1, index)[:, 0]
            else:
                distance = _distance(vectors @ vectors.gather(1, index).mT)[..., 0]
            if k:  # to the nearest of the chosen ones
                distance = nearest.minimum(distance)
            nearest = distance.masked_fill(~valid, -2.0).scatter(1, pick, -1.0)
        return keep_tokens(picks, valid, context.size)


def _distance(cosine: Tensor) -> Tensor:
    distance = 1 - cosine
    return distance.masked_fill(distance < _EQUAL, 0.0)


def _start(vectors: Tensor, pairs: Tensor | None, valid: Tensor) -> Tensor:
    """The first token is the one with the highest of these `[B, N]`."""
    if pairs is None:
        mean = vectors.sum(1, keepdim=True) / valid.sum(1).clamp(min=1)[:, None, None]
        return _distance(vectors @ mean.mT)[..., 0]
    others = valid[:, None] & ~torch.eye(valid.shape[1], dtype=torch.bool, device=valid.device)
    return pairs.masked_fill(~others, 2.0).amin(2)
