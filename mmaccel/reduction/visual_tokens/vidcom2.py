"""VidCom2: X. Liu, Y. Wang, J. Ma, L. Zhang, EMNLP 2025 (arXiv:2505.14454), section 3, and its
code: the half of the channels with the lowest variance, normalised; similarity to the centres of
video and frame by Gaussians of five bandwidths; a frame's share is in proportion to 1 + p - mean p,
with p the softmax of how little its tokens resemble the video's centre (temperature 0.01); the
tokens least similar to both centres stay.

Departures: shares add up to the budget; the code rounds each frame's and so keeps more or fewer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.reduction.visual_tokens.budgets import share_out
from mmaccel.reduction.visual_tokens.context import VisualContext
from mmaccel.reduction.visual_tokens.contract import TokenReducer
from mmaccel.reduction.visual_tokens.plan import Plan, keep_tokens, sum_slots
from mmaccel.reduction.visual_tokens.selection import (
    top_in_groups,
    unit,
)

BANDWIDTHS = tuple(2.0**k for k in range(-3, 2))
TEMPERATURE = 0.01


@dataclass(frozen=True)
class VidCom2(TokenReducer):
    """Keeps what is unlike its frame and its video; the paper's is `keep=0.25`.

    Loses: one moving thing in a busy scene, and clips of few frames. Single images are refused.
    """

    needs = frozenset({"frames"})

    def score(self, context: VisualContext) -> Tensor:
        """Unlikeness to both centres, `[B, N]`."""
        to_video, to_frame = _similarities(context)
        return -(to_video + to_frame)

    def select(self, scores: Tensor, context: VisualContext, budget: Tensor) -> Plan:
        valid = context.valid
        shares = self.shares(context, budget)
        chosen = top_in_groups(scores, context.known_group, valid, shares)
        return keep_tokens(chosen, valid, context.size)

    def shares(self, context: VisualContext, budget: Tensor) -> Tensor:
        """How many tokens of each frame stay, `[B, F]` int64."""
        sizes = context.group_sizes
        to_video, _ = _similarities(context)
        alike = _mean_by(to_video[..., None], context, sizes)[..., 0]
        p = (-alike / TEMPERATURE).masked_fill(sizes == 0, float("-inf")).softmax(1)
        frames = (sizes > 0).sum(1, keepdim=True).clamp(min=1)
        return share_out(budget, sizes * (1 + p - 1 / frames).nan_to_num(), sizes)


def _similarities(context: VisualContext) -> tuple[Tensor, Tensor]:
    """Similarity of each token to its video's centre and to its frame's, `[B, N]` each."""
    frame = context.known_group
    vectors = unit(_quiet_half(context), context.valid)
    sizes = context.group_sizes
    whole = vectors.sum(1, keepdim=True) / context.counts.clamp(min=1)[:, None, None]
    frame_centre = _mean_by(vectors, context, sizes).gather(1, frame[..., None].expand_as(vectors))
    distances = [((vectors - centre) ** 2).sum(2) for centre in (whole, frame_centre)]
    to_video, to_frame = (sum_gaussians(distance) for distance in distances)
    return to_video, to_frame


def sum_gaussians(distance: Tensor) -> Tensor:
    """Sum over the bandwidths of Gaussians of squared distances, any shape."""
    return torch.stack([(-distance / (2 * width)).exp() for width in BANDWIDTHS]).sum(0)


def _quiet_half(context: VisualContext) -> Tensor:
    """The half of the channels with the lowest variance: `[B, N, C // 2]` float32."""
    x = context.x.float()
    valid = context.valid[..., None]
    counts = context.counts.clamp(min=1)[:, None, None]
    mean = x.where(valid, 0.0).sum(1, keepdim=True) / counts
    variance = ((x - mean).where(valid, 0.0) ** 2).sum(1)
    order = variance.argsort(dim=1, stable=True)[:, : max(1, x.shape[2] // 2)]
    return x.gather(2, order.sort(1).values[:, None].expand(-1, x.shape[1], -1))


def _mean_by(values: Tensor, context: VisualContext, sizes: Tensor) -> Tensor:
    """Means of values `[B, N, C]` over each frame: `[B, F, C]`."""
    frame = context.group.where(context.valid, -1)
    return sum_slots(values, frame, sizes.shape[1]) / sizes.clamp(min=1)[..., None]
