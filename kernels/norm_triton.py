"""Parts of kernels that have a norm in them; a mean is summed in another order than torch's."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def measure(x, is_own, count, eps, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Mean (RMS norm: 0) and 1 / root mean square of `count` own float32 numbers; others are 0."""
    mean = 0.0
    if KIND == "layer":
        mean = tl.sum(x, 0) / count
        x = tl.where(is_own, x - mean, 0.0)
    return mean, tl.rsqrt(tl.sum(x * x, 0) / count + eps)


@triton.jit
def weigh(x, mean, factor, weight, bias, at, is_own, offset):  # type: ignore[no-untyped-def]
    """The norm of float32 numbers whose weights are at `at`; 0 outside of its own."""
    y = (x - mean) * factor
    if weight is not None:
        y = y * (tl.load(weight + at, mask=is_own, other=0.0).to(tl.float32) + offset)
    if bias is not None:
        y += tl.load(bias + at, mask=is_own, other=0.0).to(tl.float32)
    return tl.where(is_own, y, 0.0)
