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
    weights = weights.float()
    others = weights.masked_fill(is_kept, 0).contiguous()
    missing = p - weights.where(is_kept, 0).sum(-1, keepdim=True)  # [..., 1]

    # the largest threshold with enough mass, bit by bit: as integers, the bits of numbers that are
    # not negative are in the same order; those of numbers up to 1 are below 2 ** 30
    bits = others.view(torch.int32)
    least = torch.zeros_like(missing, dtype=torch.int32)
    for bit in reversed(range(30)):
        higher = least | (1 << bit)
        mass = others.where(bits >= higher, 0).sum(-1, keepdim=True)
        least = higher.where(mass >= missing, least)

    # of those at the threshold itself the first ones, as many as are needed
    is_above = bits > least
    is_least = (bits == least) & (others > 0)
    left = missing - others.where(is_above, 0).sum(-1, keepdim=True)
    n_left = (left / least.view(torch.float32)).ceil()
    return is_above | (is_least & (is_least.cumsum(-1) <= n_left)) | is_kept
