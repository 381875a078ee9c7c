"""Guidance, temperature, top-k, top-p, min-p: raw logits to scores of the target distribution.

Sources: classifier-free guidance, Ho & Salimans 2022 (arXiv 2207.12598); two guidance scales,
T. Brooks, A. Holynski, A. Efros, "InstructPix2Pix", CVPR 2023 (arXiv 2211.09800), equation 3;
top-k, Fan et al. 2018 (arXiv 1805.04833); top-p, Holtzman et al. 2019 (arXiv 1904.09751); min-p,
Nguyen et al. 2024 (arXiv 2407.01082).

Departures: see `mmaccel.samplers.sampling_params`, which puts these steps in order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmaccel.errors import ShapeError
from mmaccel.kernels import truncation_numpy
from mmaccel.kernels.dispatch import mode

NEVER = float("-inf")


def guide(
    logits: Tensor, branches: int, scale: float | Tensor, second_scale: float = 1.0
) -> Tensor:
    """Combine guidance branches, `[G * B, W, V]` float32, branch-major, to `[B, W, V]`: conditional
    c first, unconditional u last; `scale` may be `[B, W, 1]`. One: c. Two: ``u + scale (c - u)``.
    Three, with i (the image alone) between: ``u + second_scale (i - u) + scale (c - i)``.
    """
    if branches == 1:
        return logits
    if branches == 2:
        c, u = logits.chunk(2)
        return (c - u).mul_(scale).add_(u)
    if branches != 3:
        raise ShapeError(
            f"guidance: expected 1, 2 or 3 branches, received {branches}; combine the others first"
        )
    c, i, u = logits.chunk(3)
    return (i - u).mul_(second_scale).add_(u).add_((c - i).mul_(scale))


def truncate(
    scores: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
) -> Tensor:
    """Temperature, top-k, top-p and min-p on scores `[..., V]` float32, in this order; -inf marks
    what is cut off.

    Args:
        temperature: 0 makes the most likely token certain (the lowest id at a tie), and a row of
            invalid logits NaN.
        top_k: keep the k most likely tokens and those tied with the k-th.
        top_p: keep the smallest set of most likely tokens whose mass reaches this; at a tie the
            lower ids.
        min_p: keep tokens at least this share of the most likely one's probability.
    """
    if temperature == 0:
        peak = scores.max(-1)
        invalid_logits = (peak.values - peak.values)[..., None]  # 0, or NaN
        return make_certain(scores, peak.indices) + invalid_logits
    if temperature != 1.0:
        scores = scores / temperature
    if top_k is not None and top_k < scores.shape[-1]:
        least = scores.topk(top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, NEVER)
    if top_p is not None and top_p < 1:
        ordered, order = sort_falling(scores)
        mass = ordered.softmax(-1)
        beyond = mass.cumsum(-1) - mass >= top_p  # the mass before a token suffices already
        beyond[..., 0] = False
        scores = scores.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), NEVER)
    if min_p:
        least = scores.amax(-1, keepdim=True) + math.log(min_p)
        scores = scores.masked_fill(scores < least, NEVER)
    return scores


def make_certain(scores: Tensor, tokens: Tensor) -> Tensor:
    """All probability on `tokens` `[B, W]` >= 0; other entries of `scores` `[B, W, V]` stay."""
    one_hot = torch.full_like(scores, NEVER).scatter(-1, tokens.clamp(min=0)[..., None], 0.0)
    return torch.where((tokens >= 0)[..., None], one_hot, scores)


def sort_falling(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights `[..., V]` by rank, at a tie the first one first, and where they stood (int64)."""
    # numpy's pays for any number of rows, and depends on no run
    if weights.device.type == "cpu" and weights.dtype == torch.float32 and mode() == "auto":
        return truncation_numpy.sort_falling(weights)
    return weights.sort(dim=-1, descending=True, stable=True)
