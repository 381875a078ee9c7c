"""Which entries have the highest scores or the most mass, alike for a row alone and in a batch."""

from __future__ import annotations

import torch
from torch import Tensor


def choose_highest(scores: Tensor, wanted: Tensor, most: int) -> Tensor:
    """The highest scores of each row; of equal ones the first.

    `topk` takes any of equal ones, and others where a row has more columns.

    Args:
        scores: `[..., N]`.
        wanted: `[..., 1]` int64, how many of each row.
        most: no row wants more; 1..N.

    Returns:
        `[..., N]` bool.
    """
    values = scores.topk(most, -1).values  # descending
    index = (wanted - 1).clamp(0, most - 1).expand(*scores.shape[:-1], 1)
    least = values.gather(-1, index)
    is_above = scores > least
    is_least = scores == least
    left = wanted - is_above.sum(-1, keepdim=True)
    return is_above | (is_least & (is_least.cumsum(-1) <= left))


def choose_mass(weights: Tensor, p: float, is_kept: Tensor) -> Tensor:
    """The fewest entries beside those that are kept with which a row has a mass of p.

    Args:
        weights: `[..., N]`, not negative; those of a row sum up to 1.
        p: the mass, in (0, 1].
        is_kept: broadcastable bool, entries that are chosen in any case, and count.

    Returns:
        `[..., N]` bool; of entries without weight only those that are kept.
    """
    order = (weights + 2 * is_kept).argsort(dim=-1, descending=True, stable=True)
    ordered = weights.gather(-1, order)
    before = ordered.cumsum(-1) - ordered  # the mass of those that come first
    is_wanted = (before < p) & (ordered > 0)
    return torch.zeros_like(is_wanted).scatter(-1, order, is_wanted) | is_kept
