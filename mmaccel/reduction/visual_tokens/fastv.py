"""FastV: L. Chen et al., ECCV 2024 (arXiv:2403.06764), section 4.1, with the attention of the last
token, as the released code has it (the paper says: average over all tokens).

Departures: attention is the mass received in the one layer before the cut, never a map, so that no
layer leaves its fast kernel; `top_p` lets a row keep fewer tokens than its budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmaccel.checks import within
from mmaccel.reduction.visual_tokens import budgets
from mmaccel.reduction.visual_tokens.context import VisualContext
from mmaccel.reduction.visual_tokens.contract import Stage, TokenReducer


@dataclass(frozen=True)
class FastV(TokenReducer):
    """Keeps what the prompt's last token attends to in one early layer; the paper's is `keep=0.5`.

    Args:
        layer: the first that receives fewer tokens (the paper's K).
        top_p: keep no more than the tokens that hold this fraction of the attention on all visual
            tokens; None: keep the whole budget.

    Loses: what compares places: early attention prefers tokens near the text; what is dropped is
    lost for the whole answer.
    Figures: `scenes-vqa`: 5.0 points lost of 97.0 at 22 %; the mass of one query is 2.3 times as
    fast as maps.
    """

    layer: int = within(2, 1, hint="a plan is made from the layer before")
    top_p: float | None = within(
        None, 0, 1, "give the fraction of attention that stays", above_low=True
    )

    stage: ClassVar[Stage] = "llm_layer"

    needs = frozenset({"last_attention"})

    def layers_in(self, depth: int) -> tuple[int, ...]:
        return (self.layer,)

    def score(self, context: VisualContext) -> Tensor:
        """Attention of the last token, `[B, N]`."""
        return context.attention(self.layer - 1, "last")

    def limit(self, scores: Tensor, context: VisualContext, budget: Tensor) -> Tensor:
        if self.top_p is None:
            return budget
        return budget.minimum(budgets.top_p(scores, context.valid, self.top_p))
