"""The place of the largest score."""

from __future__ import annotations

import torch
from torch import Tensor


def argmax(scores: Tensor) -> Tensor:
    """The place `[...]` int64 of the largest of `scores` `[..., V]`.

    Of equal ones the first counts, and NaN before any number.
    """
    return torch.argmax(scores, -1)
