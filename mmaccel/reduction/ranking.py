"""Which entries have the highest scores, alike for a row alone and in any batch."""

from __future__ import annotations

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
