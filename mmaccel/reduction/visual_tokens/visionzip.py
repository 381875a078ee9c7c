"""VisionZip: S. Yang et al., CVPR 2025 (arXiv:2412.04467), section 3: *dominant* tokens have the
highest attention of the class token in the layer before the last; of the others, every n-th is a
*contextual* one into which the rest is merged by similarity of keys. 10 of 64 are contextual.

Departures: a contextual token is the mean of its tokens, where the code adds the target to the mean
of the rest and so doubles its length. The class token itself is not kept: no model of transformers
gives it to its language model. Attention is the mass received, not a map.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from mmaccel.checks import MANY, one_of, within
from mmaccel.reduction.visual_tokens.context import VisualContext
from mmaccel.reduction.visual_tokens.contract import TokenReducer
from mmaccel.reduction.visual_tokens.plan import Plan, merge_tokens
from mmaccel.reduction.visual_tokens.selection import heads_as_one, itself, nearest, top
from mmaccel.reduction.visual_tokens.uniform_tokens import spaced


@dataclass(frozen=True)
class VisionZip(TokenReducer):
    """Keeps the tokens that the class token attends to, and merges the others into a few.

    Args:
        contextual: the fraction of kept tokens that others are merged into.
        queries: whose attention ranks: "cls" the class token's, "all" that of all visual tokens
            (the paper's rule for encoders without a class token).
        layer: of the encoder, whose attention and keys are used.

    Loses: where late layers store global facts in plain background; means are states that the
    language model never saw. For LLaVA and LLaVA-NeXT, LLaVA-OneVision with `queries="all"`.
    Figures: `scenes-vqa`, 22 % kept: 3.3 points lost of 97.0.
    """

    contextual: float = within(10 / 64, 0, 1, "10/64 is the paper's")
    queries: Literal["cls", "all"] = one_of("cls", ("cls", "all"))
    layer: int = within(-2, -MANY, hint="-2 is the paper's")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({f"{self.queries}_attention", "keys"})

    def score(self, context: VisualContext) -> Tensor:
        """Attention received, `[B, N]`."""
        return context.attention(self.layer, self.queries)

    def select(self, scores: Tensor, context: VisualContext, budget: Tensor) -> Plan:
        valid = context.valid
        merged = (budget * self.contextual + 0.5).floor().long().clamp(min=1).minimum(budget - 1)
        dominant = top(scores, valid, budget - merged)
        rest = valid & ~dominant
        targets = spaced(rest, merged)
        index, _ = nearest(heads_as_one(context.keys(self.layer), valid), targets)
        return merge_tokens(index.where(rest & ~targets, itself(valid)), valid, size=context.size)
