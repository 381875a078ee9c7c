"""Block scores in Triton: summaries are read once for all queries of their head; those of blocks
that the window has written in are made, and scored before they are stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.kernels.block_scores import Kind
from mmaccel.kernels.build import Build
from mmaccel.kernels.takes import CACHE, HEADS, Takes

TAKES = {"q": HEADS, "k": CACHE, "summaries": Takes(like="q", adjacent=False)}
_KINDS = {"given": 0, "bounds": 1, "means": 2, "sums": 3}
_TILE = 32  # blocks of a program
_WARPS = {2: 8, 4: 4}  # by the bytes of a number
_ENTRIES = tl.constexpr(16)  # of a block that are read at a time


@triton.jit
def _summarise(  # type: ignore[no-untyped-def]
    k, first, last, k_step, head, KIND: tl.constexpr, D: tl.constexpr
):
    """Of the positions first ... last - 1: the largest keys `[D]` and the smallest ones, negated;
    or twice the sum, divided by the number or its square root.
    """
    d = tl.arange(0, D)
    lane = tl.arange(0, _ENTRIES)
    high = tl.full([D], float("-inf") if KIND == 1 else 0.0, tl.float32)
    low = high
    for begin in range(first, last, _ENTRIES):
        is_real = (begin + lane < last)[:, None] & (d < head)[None, :]
        at = (begin + lane)[:, None] * k_step + d[None, :]
        keys = tl.load(k + at, mask=is_real, other=0.0).to(tl.float32)
        if KIND == 1:
            high = tl.maximum(high, tl.max(tl.where(is_real, keys, float("-inf")), 0))
            low = tl.maximum(low, tl.max(tl.where(is_real, -keys, float("-inf")), 0))
        else:
            high += tl.sum(keys, 0)
    count = (last - first).to(tl.float32)
    if KIND == 2:
        high = high / count
    if KIND == 3:
        high = high / tl.sqrt(count)
    return high, low


@triton.jit
def _score_kernel(  # type: ignore[no-untyped-def]
    q, k, summaries, start, out,
    q_row, q_head, q_step, k_row, k_head, k_step, s_row, s_head, s_block, s_number,
    heads, group, width, room, head, n_blocks, size,
    KIND: tl.constexpr, EACH: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    row = (pair // heads).to(tl.int64)
    key_head = (pair % heads).to(tl.int64)
    begin = tl.program_id(1) * N
    n = begin + tl.arange(0, N)
    d = tl.arange(0, D)
    first_position = tl.load(start + row).to(tl.int32)
    end = tl.minimum(first_position + width, room)
    is_held = n * size < end
    k += row * k_row + key_head * k_head
    summaries += row * s_row + key_head * s_head
    at = n[None, :] * s_block + d[:, None] * s_number  # of a head: fits 32 bits
    is_there = (n < n_blocks)[None, :] & (d < head)[:, None]
    high = tl.load(summaries + at, mask=is_there, other=0.0)  # [D, N]
    if KIND == 1:
        low = tl.load(summaries + at + head * s_number, mask=is_there, other=0.0)
    if KIND > 0:
        oldest = tl.maximum(first_position // size, begin)
        behind = tl.minimum(tl.cdiv(end, size), begin + N)
        for block in range(oldest, behind):
            last = tl.minimum((block + 1) * size, end)
            new, new_low = _summarise(k, block * size, last, k_step, head, KIND, D)
            new = new.to(high.dtype)
            own = summaries + (block * s_block + d * s_number)
            tl.store(own, new, mask=d < head)
            is_new = (n == block)[None, :]
            high = tl.where(is_new & (d < head)[:, None], new[:, None], high)
            if KIND == 1:
                new_low = new_low.to(low.dtype)
                tl.store(own + head * s_number, new_low, mask=d < head)
                low = tl.where(is_new & (d < head)[:, None], new_low[:, None], low)
    best = tl.full([N], float("-inf"), tl.float32)
    q += row * q_row + key_head * group * q_head
    queries = group * width
    for first in range(0, queries, M):
        packed = first + tl.arange(0, M)  # query w of head g of the group is g * W + w
        is_row = packed < queries
        line = (packed // width).to(tl.int64) * q_head + (packed % width).to(tl.int64) * q_step
        asking = tl.load(
            q + line[:, None] + d[None, :], mask=is_row[:, None] & (d < head)[None, :], other=0.0
        )
        if KIND == 1:
            up = tl.where(asking > 0, asking, 0.0).to(high.dtype)
            down = tl.where(asking < 0, -asking, 0.0).to(high.dtype)
            scores = tl.dot(up, high, input_precision="ieee")
            scores += tl.dot(down, low, input_precision="ieee")
        else:
            scores = tl.dot(asking, high, input_precision="ieee")
        if EACH:
            scores = tl.where(is_held[None, :], scores, float("-inf"))
            to = (pair.to(tl.int64) * queries + packed)[:, None] * n_blocks + n[None, :]
            tl.store(out + to, scores, mask=is_row[:, None] & (n < n_blocks)[None, :])
        else:
            best = tl.maximum(best, tl.max(tl.where(is_row[:, None], scores, float("-inf")), 0))
    if not EACH:
        best = tl.where(is_held, best, float("-inf"))
        tl.store(out + pair.to(tl.int64) * n_blocks + n, best, mask=n < n_blocks)


def block_scores(
    q: Tensor,
    k: Tensor,
    summaries: Tensor,
    start: Tensor,
    *,
    size: int,
    kind: Kind,
    each: bool = False,
) -> Tensor:
    (rows, query_heads, width, head), (heads, room) = q.shape, k.shape[1:3]
    q = q if q.stride(-1) == 1 else q.contiguous()
    n_blocks = summaries.shape[2]
    group = query_heads // heads
    shape = (rows, heads, group * width, n_blocks) if each else (rows, heads, n_blocks)
    out = torch.empty(shape, dtype=torch.float32, device=q.device)
    _score_kernel[(rows * heads, triton.cdiv(n_blocks, _TILE))](
        q, k, summaries, start.contiguous(), out, *q.stride()[:3], *k.stride()[:3],
        *summaries.stride(), heads, group, width, room, head, n_blocks, size,
        KIND=_KINDS[kind], EACH=each, M=16, N=_TILE, D=max(16, triton.next_power_of_2(head)),
        num_warps=_WARPS[q.element_size()], num_stages=1,
    )  # fmt: skip
    return out


def builds() -> list[Build]:
    return [
        _build(itemsize, kind, each)
        for itemsize in (2, 4)
        for kind in _KINDS.values()
        for each in (False, True)
    ]


def _build(itemsize: int, kind: int, each: bool) -> Build:
    number = "*fp32" if itemsize == 4 else "*bf16"
    kinds = dict.fromkeys(("q", "k", "summaries"), number) | {"start": "*i64", "out": "*fp32"}
    constants = {"KIND": kind, "EACH": each, "M": 16, "N": _TILE, "D": 512 // itemsize}
    aligned = ("q_row", "q_head", "q_step", "k_row", "k_head", "k_step", "head")
    return Build.of(_score_kernel, kinds, constants, _WARPS[itemsize], 1, 255, aligned)
