"""Distinguishes errors of the device from errors of the program.

What a device computes after an error of its own means nothing, and CUDA reports the error at some
later call. Code that catches exceptions and goes on must therefore let such an error through.
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
