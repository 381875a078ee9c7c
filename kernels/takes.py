"""What a Triton kernel takes: a declaration beside it, which `mmaccel.kernels.dispatch` reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

COMMON = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Takes:
    """What a kernel takes of a tensor."""

    dtypes: tuple[torch.dtype, ...] = ()  # one of these; empty: any
    like: str = ""  # another argument, whose dtype it has; empty: none
    axes: int = 0  # how many; 0: any number, here and below
    widest: int = 0  # numbers of its last axis at most
    most_bytes: int = 0  # of its last axis
    adjacent: bool = True  # whether those stand side by side in memory
    reach: int = 0  # numbers that its third axis may lie apart from its first entry

    def refuse(self, name: str, tensor: Tensor, other: Tensor | None = None) -> str | None:
        """Why the kernel cannot take a tensor, `other` what `like` names; None if it can."""
        width = tensor.shape[-1]
        if self.dtypes and tensor.dtype not in self.dtypes:
            return f"{name} in {tensor.dtype}, which the kernel does not compute in"
        if other is not None and tensor.dtype != other.dtype:
            return f"{name} in {tensor.dtype} beside {self.like} in {other.dtype}"
        if self.axes and tensor.ndim != self.axes:
            return f"{name} {list(tensor.shape)}; the kernel takes {self.axes} axes"
        if self.widest and width > self.widest:
            return f"{name} {list(tensor.shape)}, at most {self.widest} wide"
        if self.most_bytes and width * tensor.element_size() > self.most_bytes:
            return f"{name} {list(tensor.shape)} in {tensor.dtype}, at most {self.most_bytes} bytes"
        if self.adjacent and width > 1 and tensor.stride(-1) != 1:
            return f"{name} whose numbers are {tensor.stride(-1)} apart; call contiguous()"
        if self.reach and tensor.shape[2] * tensor.stride(2) >= self.reach:
            return f"{name}, a head of which reaches {tensor.shape[2] * tensor.stride(2)} numbers"
        return None


_HEAD = 512  # bytes: 128 numbers in float32, 256 in half types
HEADS = Takes(COMMON, most_bytes=_HEAD, adjacent=False)  # of queries
CACHE = Takes(like="q", most_bytes=_HEAD, reach=2**31)  # of keys and values
CODES = Takes((torch.uint8,), reach=2**31)  # of entries in fewer bits
