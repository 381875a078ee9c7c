"""Visual tokens at equal distances: a control, as in VTC-Bench (2026) and most papers on pruning.

Departures: the distance need not be a whole number, so that the count is exact; the i-th of K
tokens is the one in the middle of the i-th K-th part.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmaccel.reduction.visual_tokens.context import VisualContext
from mmaccel.reduction.visual_tokens.contract import TokenReducer
from mmaccel.reduction.visual_tokens.plan import Plan, keep_tokens
from mmaccel.reduction.visual_tokens.selection import order_of


@dataclass(frozen=True)
class UniformTokens(TokenReducer):
    """Keeps tokens at equal distances: a control.

    Figures: `scenes-vqa`, 22 % kept: 2.3 points lost of 97.0.
    """

    def select(self, scores: Tensor, context: VisualContext, budget: Tensor) -> Plan:
        return keep_tokens(spaced(context.valid, budget), context.valid, context.size)


def spaced(valid: Tensor, budget: Tensor) -> Tensor:
    """`budget [B]` of the valid tokens `[B, N]` at equal distances: a mask `[B, N]`."""
    n = valid.sum(1).clamp(min=1)[:, None]
    k = budget[:, None]
    before = order_of(valid) * k  # n-th parts of a step
    steps = [(2 * passed + n).div(2 * n, rounding_mode="floor") for passed in (before, before + k)]
    return valid & (steps[1] > steps[0])
