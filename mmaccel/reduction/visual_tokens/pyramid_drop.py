"""PyramidDrop: L. Xing et al., CVPR 2025 (arXiv:2410.17247), section 3.2: at the ends of stages the
fraction lambda stays, those that the last token of the instruction attends to most.

Departures: `keep` is what the last stage leaves, so that methods can be compared; the three stages
of the paper with lambda = 0.5 are `keep=0.125`. Counts are computed from the first stage's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmaccel.reduction.visual_tokens import budgets
from mmaccel.reduction.visual_tokens.context import VisualContext
from mmaccel.reduction.visual_tokens.contract import Stage, StagedReducer


@dataclass(frozen=True)
class PyramidDrop(StagedReducer):
    """`FastV` at several layers; `keep` is what the last leaves.

    Args:
        layers: those that receive fewer tokens than the one before; None: at a quarter, half and
            three quarters of the depth (8, 16 and 24 of 32, as in the paper).

    Loses: in seconds: a quarter of the depth computes all tokens (2.1 times as fast where `FastV`
    is 4.0).
    Figures: `scenes-vqa`: 0.3 points lost of 97.0 at 22 %, 1.7 at 11 %.
    """

    stage: ClassVar[Stage] = "llm_layer"
    schedule = staticmethod(budgets.geometric)

    needs = frozenset({"last_attention"})

    def usual(self, depth: int) -> tuple[int, ...]:
        return tuple(sorted({max(1, depth * part // 4) for part in (1, 2, 3)}))

    def score(self, context: VisualContext) -> Tensor:
        """Attention of the last token in the layer before, `[B, N]`."""
        assert context.layer is not None
        return context.attention(context.layer - 1, "last")
