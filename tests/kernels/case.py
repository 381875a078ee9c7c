"""One check of a Triton kernel against its specification, for any device and dtype.

Nothing here or in the `*_cases.py` needs pytest: `scripts/gpu_check.py` runs the same
cases on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch

from mmaccel.kernels.dispatch import KERNELS

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """A named check; `run(device, dtype)` raises AssertionError if the two versions differ.

    Attributes:
        name: unique within its kernel.
        run: the check.
        dtypes: what it is run in; the interpreter is wrong in bfloat16, so that is left to GPUs.
        large: too many programs for the interpreter; run on GPUs alone.
    """

    name: str
    run: Callable[[torch.device, torch.dtype], None]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    large: bool = False


def cases_of(kernel: str) -> list[Case]:
    """All cases of a kernel."""
    found: list[Case] = import_module(f"tests.kernels.{kernel}_cases").CASES
    return found


def all_cases() -> list[tuple[str, Case]]:
    """Every kernel's cases, in the order of `KERNELS`."""
    return [(kernel, case) for kernel in KERNELS for case in cases_of(kernel)]


def poison(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of NaN, or of the lowest integer: what a kernel fails to write is seen."""
    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)
    return torch.full(shape, torch.iinfo(dtype).min, dtype=dtype, device=device)
