"""Compaction in Triton: a program moves some channels of one head of one row, along its list in
order, as no source is before its target; a step reads, waits for a barrier, and writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.kernels.build import Build
from mmaccel.kernels.takes import Takes

POSITIONS = 64  # moved at a time
BYTES = 64  # of a position's numbers, a program's share
WARPS = 4


TAKES = {"store": Takes()}


@triton.jit
def _compact_kernel(  # type: ignore[no-untyped-def]
    store,
    keep,
    start,
    row_step,
    step,
    head_step,
    keep_row,
    keep_head,
    heads,
    n_keep,
    room,
    width,
    N: tl.constexpr,
    D: tl.constexpr,
):
    pair = tl.program_id(0)
    row = (pair // heads).to(tl.int64)
    head = (pair % heads).to(tl.int64)
    d = tl.program_id(1) * D + tl.arange(0, D)
    store += row * row_step + head * head_step
    keep += row * keep_row + head * keep_head
    first = row * 0
    if start is not None:
        first += tl.load(start + row)
    for begin in range(0, n_keep, N):
        entry = begin + tl.arange(0, N)
        source = tl.load(keep + entry, mask=entry < n_keep, other=-1).to(tl.int64)
        target = first + entry
        is_moved = (source >= 0) & (source < room) & (target >= 0) & (target < room)
        mask = is_moved[:, None] & (d < width)[None, :]
        moved = tl.load(store + source[:, None] * step + d[None, :], mask=mask)
        tl.debug_barrier()
        tl.store(store + target[:, None] * step + d[None, :], moved, mask=mask)


def compact(store: Tensor, keep: Tensor, start: Tensor | None = None) -> Tensor:
    rows, room, heads, width = store.shape
    if keep.numel() == 0 or store.numel() == 0:
        return store
    bits = store.view(_INTEGERS[store.element_size()])
    keep = keep.contiguous()
    block = min(BYTES // store.element_size(), triton.next_power_of_2(width))
    _compact_kernel[(rows * heads, triton.cdiv(width, block))](
        bits,
        keep,
        start if start is None else start.contiguous(),
        *bits.stride()[:3],
        keep.stride(0),
        keep.stride(1) if keep.ndim == 3 else 0,
        heads,
        keep.shape[-1],
        room,
        width,
        N=POSITIONS,
        D=block,
        num_warps=WARPS,
    )
    return store


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def builds() -> list[Build]:
    return [_build(itemsize) for itemsize in (2, 4)]


def _build(itemsize: int) -> Build:
    constants = {"N": POSITIONS, "D": BYTES // itemsize}
    kinds = {"store": f"*i{8 * itemsize}", "keep": "*i64", "start": "*i64"}
    aligned = ("row_step", "step", "head_step")
    return Build.of(_compact_kernel, kinds, constants, WARPS, 2, 96, aligned)
