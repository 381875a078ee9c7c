"""Numbers of a plan as tensors: a captured pass copies nothing and reads fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor


def as_index(values: Sequence[int], device: torch.device) -> Tensor:
    """`[n]` int64; of the same values always the same tensor, which nobody writes to."""
    return _make(tuple(values), device)


@cache
def _make(values: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.int64, device=device)
