"""Checks that window runs and canvas runs share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmaccel.errors import NumericsError, ShapeError

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_limit(limit: Any, lengths: Tensor) -> Tensor:
    """What `on_step` returned, as lengths `[B]` int64, at least 0."""
    if isinstance(limit, Tensor) and limit.shape == lengths.shape and limit.dtype in _INTEGERS:
        return limit.to(lengths).clamp(min=0)
    is_tensor = isinstance(limit, Tensor)
    received = f"{limit.dtype} {list(limit.shape)}" if is_tensor else repr(limit)
    raise ShapeError(
        f"on_step: expected None or whole lengths [{lengths.shape[0]}] in return, received "
        f"{received}; return progress.lengths to end every row"
    )


def check_noise(seeds: Tensor, batch: int) -> None:
    if seeds.shape[0] != batch:
        raise ShapeError(
            f"noise: expected {batch} rows, received {seeds.shape[0]}; make it for this batch"
        )


def invalid_logits(rows: tuple[int, ...], loosen: str = "sampling parameters") -> NumericsError:
    """The error of rows of the prompt with logits NaN or infinite, or no token left by `loosen`."""
    return NumericsError(
        "scores: expected finite logits with at least one possible token, received NaN, "
        f"infinity or none; check the model's dtype and weights, or loosen the {loosen}",
        rows,
    )
