"""ToMe: D. Bolya et al., ICLR 2023 (arXiv:2210.09461), section 3: tokens are split into sources and
destinations, which are compared by the cosine of the keys' mean over heads, and the r most similar
sources are merged into theirs by a mean weighted by size. Attention then counts a token log(size)
stronger. Destinations are seeded, one of each part of the tokens, after D. Bolya, J. Hoffman, 2023
(arXiv:2303.17604).

Departures: a destination is one of four consecutive tokens, drawn by the seed; a source less
similar than `threshold` stays. Merging is before a layer, from the keys of the layer before it,
where the paper merges between a layer's attention and its MLP. The class token is never merged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import normalize

from mmaccel.checks import within
from mmaccel.reduction.visual_tokens.context import VisualContext
from mmaccel.reduction.visual_tokens.contract import (
    Features,
    Stage,
    StagedReducer,
)
from mmaccel.reduction.visual_tokens.plan import Plan, merge_tokens
from mmaccel.reduction.visual_tokens.selection import (
    itself,
    nearest,
    order_of,
    random_uniforms,
    rank_in_groups,
    top,
)


@dataclass(frozen=True)
class ToMe(StagedReducer):
    """Merges similar tokens in the layers of the encoder, as many before each; `keep` is what is
    left of an image, tile or frame after the last. Attention then counts a token by how many it
    stands for.

    Args:
        layers: those that receive fewer tokens than the one before; None: all but the first, of
            those whose states the model uses.
        threshold: the least cosine of two tokens that are merged; None: merge the budget.
        features: what the language model sees: "merged", a feature for each merged token, at the
            position of the token that represents it; "all", every token has the feature of what it
            was merged into, and the encoder alone is faster; "auto", merged where a feature is a
            token of the encoder, all where a projector pools or shuffles the grid first.

    Loses: where an image has no alike tokens: give `threshold`. Behind projectors that need the
    grid the encoder alone becomes cheaper. Refused: Qwen-VL, Chameleon, `VisionZip` and `HiRED`
    beside it.
    Figures: `scenes-vqa`, 22 % kept: 3.7 points lost of 97.0; LLaVA-OneVision sizes, encoder
    included: 2.65 times as fast to the first token (`DivPrune` 1.75).
    """

    threshold: float | None = within(None, -1, 1, "give a cosine, 0.8 for alike")
    features: Features = "auto"

    stage: ClassVar[Stage] = "encoder_layer"

    needs = frozenset({"keys"})

    def usual(self, depth: int) -> tuple[int, ...]:
        return tuple(range(1, depth))

    def select(self, scores: Tensor, context: VisualContext, budget: Tensor) -> Plan:
        assert context.layer is not None
        valid = context.valid
        quarter = (context.counts + 2).div(4, rounding_mode="floor").clamp(min=1)
        destinations = _one_of_each(context, quarter.minimum(budget))
        keys = normalize(context.keys(context.layer - 1).float().mean(2), dim=-1)
        index, cosine = nearest(keys, destinations)
        sources = valid & ~destinations
        merged = top(cosine, sources, context.counts - budget)
        if self.threshold is not None:
            merged &= cosine >= self.threshold
        return merge_tokens(index.where(merged, itself(valid)), valid, size=context.size)


def _one_of_each(context: VisualContext, parts: Tensor) -> Tensor:
    """One random token of each of `parts [B]` consecutive parts of a row: a mask `[B, N]`."""
    valid = context.valid
    part = (order_of(valid) * parts[:, None]).div(
        context.counts.clamp(min=1)[:, None], rounding_mode="floor"
    )
    part = part.where(valid, 0)
    numbers = random_uniforms(context.seeds, valid, context.layer or 0)
    return valid & (rank_in_groups(numbers, part, valid, int(parts.max())) == 0)
