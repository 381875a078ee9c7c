"""Sorting by rank."""

from __future__ import annotations

from torch import Tensor


def sort_falling(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights `[..., V]` by rank, at a tie the first one first, and where they stood (int64)."""
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    return ordered, order
