"""Values of MMACCEL_KERNELS, and devices where no kernel runs."""

from __future__ import annotations

import os
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mmaccel.errors import MissingBackendError
from mmaccel.kernels import dispatch
from mmaccel.kernels.noise import uniforms
from tests.messages.case import Refused


def _ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def _with_kernels(value: str, call: Any) -> Any:
    def refused() -> None:
        with mock.patch.dict(os.environ, {dispatch.VARIABLE: value, "TRITON_INTERPRET": ""}):
            dispatch.find_obstacle.cache_clear()
            call()

    return refused


_NOISE = partial(dispatch.run, uniforms, _ids(2), _ids(2), _ids(2, 1), 5, _ids())
CASES = (
    Refused(
        "another value of the variable",
        _with_kernels("cuda", _NOISE),
        says=("MMACCEL_KERNELS", "auto, torch, triton", "'cuda'"),
    ),
    Refused(
        "a kernel where none runs",
        _with_kernels("triton", _NOISE),
        says=("uniforms", "Triton kernel", "cpu", "MMACCEL_KERNELS=auto"),
        error=MissingBackendError,
    ),
    Refused(
        "a device where no kernel runs",
        _with_kernels("triton", partial(dispatch.check, "cpu")),
        says=("a device that Triton", "received cpu", "MMACCEL_KERNELS=auto"),
        error=MissingBackendError,
    ),
)
