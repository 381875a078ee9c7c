"""A kernel that turns uniforms to Gumbel noise, as those that draw do inside."""

from __future__ import annotations

import triton
import triton.language as tl

from mmaccel.kernels.noise_triton import to_gumbel


@triton.jit
def gumbel_kernel(uniform, out):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, 512)
    tl.store(out + lane, to_gumbel(tl.load(uniform + lane)))
