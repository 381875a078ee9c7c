"""FiCoCo: Y. Han et al. (arXiv:2411.17686), section 3. Redundant is what resembles the other visual
tokens and is attended to little, by the class token (V, in the encoder, weight 0.35) or by the text
(L, in the language model, weight 0.4). It is merged into those that stay and resemble it. V has the
paper's local penalty: in each 2 x 2 window the most redundant token counts as more so.

Departures: attention between patches is replaced by the cosine of keys; a token goes into its one
best match among those that stay, by a mean weighed by the correlation. The released code adds to
other tokens than it has chosen (it uses indices of all tokens for those that stay), and its L
variant uses attention of visual tokens to later text, which is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mmaccel.checks import within
from mmaccel.reduction.visual_tokens.context import Queries, VisualContext
from mmaccel.reduction.visual_tokens.contract import (
    Features,
    Stage,
    StagedReducer,
)
from mmaccel.reduction.visual_tokens.plan import Plan, merge_tokens
from mmaccel.reduction.visual_tokens.selection import (
    heads_as_one,
    itself,
    nearest,
    rank_in_groups,
    top,
)


@dataclass(frozen=True)
class _FiCoCo(StagedReducer):
    """What the two variants share."""

    attended: float = within(0.0, 0, 1, "a weight between 0 and 1")

    queries: ClassVar[Queries]

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"keys", f"{self.queries}_attention"})

    def score(self, context: VisualContext) -> Tensor:
        """The opposite of redundancy, `[B, N]`."""
        assert context.layer is not None
        keys = heads_as_one(context.keys(context.layer - 1), context.valid)
        alike = (keys @ keys.sum(1)[..., None])[..., 0] / context.counts.clamp(min=1)[:, None]
        mass = context.attention(context.layer - 1, self.queries).where(context.valid, 0.0)
        seen = self.attended * normalize(mass, dim=1)
        return seen - (1 - self.attended) * normalize(alike.where(context.valid, 0.0), dim=1)

    def select(self, scores: Tensor, context: VisualContext, budget: Tensor) -> Plan:
        assert context.layer is not None
        valid = context.valid
        stays = top(scores, valid, budget)
        keys = heads_as_one(context.keys(context.layer - 1), valid)
        index, cosine = nearest(keys, stays)
        mass = cosine.clamp(min=1e-3).masked_fill(stays, 1.0) * context.size
        return merge_tokens(index.where(~stays, itself(valid)), valid, mass, context.size)


@dataclass(frozen=True)
class FiCoCoV(_FiCoCo):
    """FiCoCo in the layers of the encoder; `keep` is what is left after the last.

    Args:
        layers: those that receive fewer tokens than the one before; None: from the middle on, of
            those whose states the model uses (12 ... 22 of 24 where it uses the last but one, as
            the released code chooses).
        attended: weight of the class token's attention, against that of the resemblance.
        local_penalty: count the most redundant token of each 2 x 2 window as more redundant, if
            the context has a grid, so that what is removed is spread over the image.
        features: what the language model sees, see `ToMe`.

    Loses: as `ToMe`; each layer compares all pairs.
    Figures: `scenes-vqa`, 22 % kept: 6.0 points lost of 97.0.
    """

    attended: float = 0.35
    local_penalty: bool = True
    features: Features = "auto"

    stage: ClassVar[Stage] = "encoder_layer"
    queries: ClassVar[Queries] = "cls"

    def usual(self, depth: int) -> tuple[int, ...]:
        return tuple(range(max(1, (depth + 1) // 2), max(2, depth)))

    def score(self, context: VisualContext) -> Tensor:
        scores = super().score(context)
        if not self.local_penalty or "grid" not in context.has:
            return scores
        window = [
            axis.clamp(0).div(2, rounding_mode="floor") for axis in (context.row, context.column)
        ]
        rows, columns = (int(axis.max()) + 1 for axis in window)
        window_of = (context.group * rows + window[0]) * columns + window[1]
        window_of = window_of.where(context.valid, 0)
        place = rank_in_groups(-scores, window_of, context.valid, int(window_of.max()) + 1)
        lower = torch.where(scores > 0, scores / 2, scores * 2)
        return lower.where(place == 0, scores)


@dataclass(frozen=True)
class FiCoCoL(_FiCoCo):
    """FiCoCo in the layers of the language model; `keep` is what is left after the last.

    Args:
        layers: those that receive fewer tokens than the one before; None: from the fifth on.
        attended: weight of the text's attention, against that of the resemblance.

    Loses: in shallow models, as it begins at layer 5; it is nearly the slowest, and the most
    accurate on `scenes-vqa`, where it loses nothing at 11 %.
    """

    attended: float = 0.4

    stage: ClassVar[Stage] = "llm_layer"
    queries: ClassVar[Queries] = "text"

    def usual(self, depth: int) -> tuple[int, ...]:
        return tuple(range(min(5, depth - 1), depth))
