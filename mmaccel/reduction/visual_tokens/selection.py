"""Ranks, choices by rank and means of groups, batched over rows; shared by the methods.

Equal scores are ordered by index, the lower first, so that a choice does not depend on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mmaccel.kernels.noise import uniforms

_LOWEST, _HIGHEST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
_RANDOM_TOKENS = 0x76746F6B  # what these random numbers are for; no sampler uses this word


def rank(scores: Tensor, valid: Tensor) -> Tensor:
    """The place of every token, 0 for the highest score; `[B, N]` int64. Invalid tokens come last,
    after a valid one whose score is -inf or NaN.
    """
    scores = scores.float().nan_to_num(_LOWEST, _HIGHEST, _LOWEST).where(valid, float("-inf"))
    return invert(scores.argsort(dim=1, descending=True, stable=True))


def invert(order: Tensor) -> Tensor:
    """The inverse of each row's permutation, `[B, N]` int64."""
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def top(scores: Tensor, valid: Tensor, budget: Tensor) -> Tensor:
    """The `budget [B]` highest scores `[B, N]` of every row: a mask `[B, N]`."""
    return valid & (rank(scores, valid) < budget[:, None])


def top_in_groups(scores: Tensor, group: Tensor, valid: Tensor, counts: Tensor) -> Tensor:
    """The `counts [B, G]` highest scores `[B, N]` of every group: a mask `[B, N]`."""
    places = rank_in_groups(scores, group, valid, counts.shape[1])
    return valid & (places < counts.gather(1, group))


def rank_in_groups(scores: Tensor, group: Tensor, valid: Tensor, groups: int) -> Tensor:
    """The place of every token in its group, 0 for the highest score; `[B, N]` int64."""
    by_score = rank(scores, valid)
    bins = group.where(valid, groups)
    order = invert(by_score)
    order = order.gather(1, bins.gather(1, order).argsort(dim=1, stable=True))
    sizes = count_groups(bins, torch.ones_like(valid), groups + 1)
    starts = sizes.cumsum(1) - sizes
    return invert(order) - starts.gather(1, bins)


def count_groups(group: Tensor, valid: Tensor, groups: int) -> Tensor:
    """How many valid tokens each group has: `[B, G]` int64."""
    return group.new_zeros(len(group), groups).scatter_add_(1, group, valid.long())


def count_of_groups(group: Tensor, valid: Tensor) -> int:
    """G, the number of groups of the row that has most. Cost: one host synchronisation."""
    return int(group.where(valid, 0).max()) + 1 if group.numel() else 1


def order_of(valid: Tensor) -> Tensor:
    """How many valid tokens come before each: its index if there were no padding, `[B, N]`."""
    return valid.cumsum(1) - valid.long()


def random_uniforms(seeds: Tensor, valid: Tensor) -> Tensor:
    """Uniforms `[B, N]` float32, functions of (seed `[B]`, index without padding) alone."""
    purpose = torch.tensor(_RANDOM_TOKENS, device=valid.device)
    return uniforms(seeds, torch.zeros_like(seeds), order_of(valid), 1, purpose)[..., 0]


def unit(states: Tensor, valid: Tensor) -> Tensor:
    """States `[B, N, C]` as float32 vectors of length 1; 0 where not valid."""
    return normalize(states.float(), dim=-1).where(valid[..., None], 0.0)
