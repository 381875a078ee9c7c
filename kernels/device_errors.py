"""Errors of the device itself, which CUDA may report at a later call. What it computes after one
means nothing: code that catches exceptions and goes on must let these through.
"""

from __future__ import annotations

import torch

_SAYS = ("CUDA error", "HIP error", "[CUDA]", "[HIP]", "cuBLAS error", "device-side assert")


def is_device_error(error: BaseException) -> bool:
    """Whether the device itself failed; running out of its memory is no such failure."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    kind = getattr(torch, "AcceleratorError", None)
    if kind is not None and isinstance(error, kind):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SAYS)
