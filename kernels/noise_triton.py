"""Philox 4x32-10 in Triton: the bits of `mmaccel.kernels.noise`, four values a thread at a time.

The logarithms of `to_gumbel` may differ from torch's in the last bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.kernels.build import Build

BLOCK = 256  # Philox blocks a program, four values each
WARPS = 4


@triton.jit
def words(seed, slot, item, purpose, blocks):  # type: ignore[no-untyped-def]
    """Four uint32 tensors, the words of Philox `blocks` (int32) of one slot."""
    counter = blocks.to(tl.uint32)
    nought = counter * 0
    return tl.philox(
        seed.to(tl.uint64, bitcast=True),
        counter,
        nought + slot.to(tl.uint32),
        nought + item.to(tl.uint32),
        nought + purpose.to(tl.uint32),
    )


@triton.jit
def to_uniform(word):  # type: ignore[no-untyped-def]
    return tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994039535522)


@triton.jit
def log(x):  # type: ignore[no-untyped-def]
    """Natural logarithm of normal positive float32, within 3 units in the last place.

    x = 2^k z with z in [sqrt(1/2), sqrt(2)); log z is the series of 2 artanh(s), s = (z-1) / (z+1),
    whose first term left out is below 2e-9 of the sum. The same operations on every device, so that
    noise does not depend on what a backend makes of `tl.log`.
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    z = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    s = tl.div_rn(z - 1.0, z + 1.0)
    t = s * s
    series = t * (0.33333333 + t * (0.2 + t * (0.14285714 + t * 0.11111111)))
    k = exponent.to(tl.float32)
    return k * 0.693145751953125 + (k * 1.4286068203094172e-06 + 2.0 * (s + s * series))


@triton.jit
def to_gumbel(uniform):  # type: ignore[no-untyped-def]
    """What 1 - u rounds away is put back in first order."""
    rest = 1.0 - uniform
    lost = (1.0 - rest) - uniform  # exact
    return -log(-(log(rest) + tl.div_rn(lost, rest)))


@triton.jit
def interleave(a, b, c, d):  # type: ignore[no-untyped-def]
    """The four words of N blocks as 4 N values, those of a block next to each other."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [a.shape[0] * 4])


@triton.jit
def _uniforms_kernel(  # type: ignore[no-untyped-def]
    seeds, items, slots, purpose, out, width, n_values, purpose_step, BLOCK: tl.constexpr
):
    entry = tl.program_id(0)
    row = entry // width
    blocks = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a, b, c, d = words(
        tl.load(seeds + row),
        tl.load(slots + entry),
        tl.load(items + row),
        tl.load(purpose + row * purpose_step),
        blocks,
    )
    value = interleave(to_uniform(a), to_uniform(b), to_uniform(c), to_uniform(d))
    index = tl.program_id(1) * BLOCK * 4 + tl.arange(0, BLOCK * 4)
    tl.store(out + entry.to(tl.int64) * n_values + index, value, mask=index < n_values)


def uniforms(seeds: Tensor, items: Tensor, slots: Tensor, n_values: int, purpose: Tensor) -> Tensor:
    batch, width = slots.shape
    out = torch.empty(batch, width, n_values, dtype=torch.float32, device=slots.device)
    grid = (batch * width, triton.cdiv(n_values, 4 * BLOCK))
    if out.numel():
        _uniforms_kernel[grid](
            seeds.contiguous(),
            items.contiguous(),
            slots.contiguous(),
            purpose,
            out,
            width,
            n_values,
            purpose.stride(0) if purpose.ndim else 0,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return out


def builds() -> list[Build]:
    kinds = dict.fromkeys(("seeds", "items", "slots", "purpose"), "*i64") | {"out": "*fp32"}
    return [Build.of(_uniforms_kernel, kinds, {"BLOCK": BLOCK}, WARPS, 2, 64)]
