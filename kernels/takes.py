"""What a Triton kernel takes: a declaration beside it, which `mmaccel.kernels.dispatch` reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

COMMON = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Takes:
    """What a kernel takes of a tensor.

    Attributes:
        dtypes: one of these; empty: any.
        axes: how many; 0: any number.
        widest: numbers of its last axis at most; 0: any number.
        adjacent: whether those stand side by side in memory.
    """

    dtypes: tuple[torch.dtype, ...] = ()
    axes: int = 0
    widest: int = 0
    adjacent: bool = True

    def refuse(self, name: str, tensor: Tensor) -> str | None:
        """Why the kernel cannot take a tensor; None if it can."""
        if self.dtypes and tensor.dtype not in self.dtypes:
            return f"{name} in {tensor.dtype}, which the kernel does not compute in"
        if self.axes and tensor.ndim != self.axes:
            return f"{name} {list(tensor.shape)}; the kernel takes {self.axes} axes"
        if self.widest and tensor.shape[-1] > self.widest:
            return f"{name} {list(tensor.shape)}, at most {self.widest} wide"
        if self.adjacent and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            return f"{name} whose numbers are {tensor.stride(-1)} apart; call contiguous()"
        return None
