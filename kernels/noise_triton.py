"""Philox 4x32-10 in Triton: the bits of `mmaccel.kernels.noise`, four values a thread at a time.

Idea: a program makes a run of Philox blocks of one slot and writes their four words side by side;
nothing is read but the counter.

Departures: none in the bits. Gumbels of other kernels come from `gumbel`, whose logarithms may
differ from torch's in the last bit.
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
    """See `mmaccel.kernels.noise.to_uniform`."""
    return tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994039535522)


@triton.jit
def gumbel(uniform):  # type: ignore[no-untyped-def]
    """See `mmaccel.kernels.noise.to_gumbel`: -log(-log1p(-u)).

    Below a quarter log1p is the series of 2 atanh(u / (2 - u)), cut where float32 ends: a logarithm
    of 1 - u would lose the small u, and with them the large Gumbels that decide.
    """
    z = uniform / (2.0 - uniform)
    square = z * z
    series = 1.0 + square * (0.33333334 + square * (0.2 + square * (0.14285715 + square / 9.0)))
    inner = tl.where(uniform < 0.25, 2.0 * z * series, -tl.log(1.0 - uniform))
    return -tl.log(inner)


@triton.jit
def _uniforms_kernel(  # type: ignore[no-untyped-def]
    seeds, items, slots, purpose, out, width, n_values, BLOCK: tl.constexpr
):
    entry = tl.program_id(0)
    row = entry // width
    blocks = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a, b, c, d = words(
        tl.load(seeds + row), tl.load(slots + entry), tl.load(items + row), tl.load(purpose), blocks
    )
    value = tl.join(tl.join(to_uniform(a), to_uniform(c)), tl.join(to_uniform(b), to_uniform(d)))
    value = tl.reshape(value, [BLOCK * 4])  # a, b, c, d of a block side by side
    index = tl.program_id(1) * BLOCK * 4 + tl.arange(0, BLOCK * 4)
    tl.store(out + entry.to(tl.int64) * n_values + index, value, mask=index < n_values)


def refuse_uniforms(
    seeds: Tensor, items: Tensor, slots: Tensor, n_values: int, purpose: Tensor
) -> str | None:
    """What keeps this twin from such arguments; None if nothing does."""
    return None


def uniforms(seeds: Tensor, items: Tensor, slots: Tensor, n_values: int, purpose: Tensor) -> Tensor:
    """See `mmaccel.kernels.noise.uniforms`. Cost: one launch, one write of the output."""
    batch, width = slots.shape
    out = torch.empty(batch, width, n_values, dtype=torch.float32, device=slots.device)
    grid = (batch * width, triton.cdiv(n_values, 4 * BLOCK))
    if out.numel():
        _uniforms_kernel[grid](
            seeds.contiguous(), items.contiguous(), slots.contiguous(), purpose, out, width,
            n_values, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return out


def builds() -> list[Build]:
    """Every configuration this file launches."""
    pointers = dict.fromkeys(("seeds", "items", "slots", "purpose"), "*i64")
    signature = {
        **pointers,
        "out": "*fp32",
        "width": "i32",
        "n_values": "i32",
        "BLOCK": "constexpr",
    }
    names = (*pointers, "out")
    return [Build(_uniforms_kernel, signature, {"BLOCK": BLOCK}, WARPS, 2, 64, names)]
