"""Choosing of blocks in Triton: thresholds by bits, and lists without a sort.

Numbers order as their bits, read as integers (below zero reversed): the lowest chosen score is
found three bits at a time, as the largest of eight thresholds with enough scores above it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.kernels.build import Build
from mmaccel.kernels.takes import Takes

WIDEST = 4096  # blocks of a row
TAKES = {"scores": Takes((torch.float32,), widest=WIDEST)}


@triton.jit
def _look(start, row, n, width, room, size):  # type: ignore[no-untyped-def]
    """Of blocks `[N]` of a row how many entries they hold, and which are read in any case."""
    first_position = tl.load(start + row).to(tl.int32)
    end = tl.minimum(first_position + width, room)
    filled = tl.minimum(tl.maximum(end - n * size, 0), size)
    is_kept = ((n >= first_position // size) | (n == 0)) & (filled > 0)
    return filled, is_kept


@triton.jit
def _list(  # type: ignore[no-untyped-def]
    chosen, filled, left_out, index, count, pair, n, most, LIST: tl.constexpr
):
    number = chosen.to(tl.int32)
    total = tl.sum(number, 0)
    place = tl.cumsum(number, 0) - 1
    index += pair.to(tl.int64) * most
    tl.store(index + place, n, mask=chosen & (place < most))
    lane = tl.arange(0, LIST)
    tl.store(index + lane, tl.full([LIST], -1, tl.int32), mask=(lane >= total) & (lane < most))
    tl.store(count + pair, total)
    held = tl.sum((filled > 0).to(tl.int32), 0)
    tl.atomic_add(left_out, (held - total).to(tl.int64))


@triton.jit
def _top_kernel(  # type: ignore[no-untyped-def]
    scores, start, left_out, index, count, heads, n_blocks, width, room, size, most, budget,
    N: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    n = tl.arange(0, N)
    filled, is_kept = _look(start, pair // heads, n, width, room, size)
    filled = tl.where(n < n_blocks, filled, 0)
    is_kept = is_kept & (n < n_blocks)
    holds = filled > 0
    score = tl.load(scores + pair.to(tl.int64) * n_blocks + n, mask=holds, other=0.0)
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # -0 is 0
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(is_kept, 0x7FFFFFFF, tl.where(holds, key, -0x80000000))
    wanted = tl.ceil(tl.sum(holds.to(tl.int32), 0).to(tl.float32) * budget).to(tl.int32)
    # the lowest key that is chosen, three bits at a time from the highest on: the largest of eight
    # thresholds that as many keys reach as are wanted
    eighth = tl.arange(0, 8)
    least = tl.min(key * 0, 0) - 0x7FFFFFFF - 1
    for step in range(11):
        shift = 30 - 3 * step
        tried = least + (eighth << shift)
        enough = tl.sum((key[None, :] >= tried[:, None]).to(tl.int32), 1) >= wanted
        enough = enough & ((step > 0) | (eighth < 4))  # two bits are left for the first step
        least += (tl.maximum(tl.sum(enough.to(tl.int32), 0) - 1, 0)) << shift
    is_above = key > least
    is_least = key == least
    room_left = wanted - tl.sum(is_above.to(tl.int32), 0)
    chosen = is_above | (is_least & (tl.cumsum(is_least.to(tl.int32), 0) <= room_left)) | is_kept
    _list(chosen & holds, filled, left_out, index, count, pair, n, most, LIST)


@triton.jit
def _share_kernel(  # type: ignore[no-untyped-def]
    scores, start, flags, heads, queries, n_blocks, width, room, size, p, scale,
    N: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)  # of a query
    pair = line // queries
    n = tl.arange(0, N)
    filled, is_kept = _look(start, pair // heads, n, width, room, size)
    filled = tl.where(n < n_blocks, filled, 0)
    holds = filled > 0
    logit = tl.load(scores + line * n_blocks + n, mask=holds, other=float("-inf"))
    logit = logit * scale + tl.log(filled.to(tl.float32))
    logit = tl.where(holds, logit, float("-inf"))
    weights = tl.exp(logit - tl.max(logit, 0))
    weights = weights / tl.sum(weights, 0)
    kept = tl.where(is_kept, weights, 0.0)
    others = weights - kept
    missing = p - tl.sum(kept, 0)
    bits = others.to(tl.int32, bitcast=True)  # of numbers up to 1: below 2 ** 30
    # the same of weights: the largest threshold whose weights have the mass that is missing
    eighth = tl.arange(0, 8)
    least = tl.min(bits * 0, 0)
    for step in range(10):
        shift = 27 - 3 * step
        tried = least + (eighth << shift)
        mass = tl.sum(tl.where(bits[None, :] >= tried[:, None], others[None, :], 0.0), 1)
        enough = (mass >= missing) & (eighth > 0)
        least += tl.sum(enough.to(tl.int32), 0) << shift
    is_above = bits > least
    rest = missing - tl.sum(tl.where(is_above, others, 0.0), 0)
    is_least = (bits == least) & (others > 0)
    n_left = tl.ceil(rest / least.to(tl.float32, bitcast=True))
    rank = tl.cumsum(is_least.to(tl.int32), 0).to(tl.float32)
    chosen = is_above | (is_least & (rank <= n_left))
    tl.store(flags + pair * n_blocks + n, tl.full([N], 1, tl.int8), mask=chosen & (n < n_blocks))


@triton.jit
def _list_kernel(  # type: ignore[no-untyped-def]
    flags, start, left_out, index, count, heads, n_blocks, width, room, size, most,
    N: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    n = tl.arange(0, N)
    filled, is_kept = _look(start, pair // heads, n, width, room, size)
    filled = tl.where(n < n_blocks, filled, 0)
    is_flagged = tl.load(flags + pair.to(tl.int64) * n_blocks + n, mask=n < n_blocks, other=0) != 0
    chosen = (is_flagged | is_kept) & (filled > 0)
    _list(chosen, filled, left_out, index, count, pair, n, most, LIST)


def choose_blocks(
    scores: Tensor,
    start: Tensor,
    left_out: Tensor,
    *,
    width: int,
    room: int,
    size: int,
    most: int,
    budget: float = 1.0,
    p: float | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Cost: one launch; with `p` three, a program a query and one a head, a byte a block."""
    rows, heads = scores.shape[:2]
    n_blocks = scores.shape[-1]
    start = start.contiguous()
    index = torch.empty(rows, heads, most, dtype=torch.int32, device=scores.device)
    count = torch.empty(rows, heads, dtype=torch.int32, device=scores.device)
    sizes = (heads, n_blocks, width, room, size, most)
    shape: dict[str, Any] = _find_shape(n_blocks)
    lists = shape | {"LIST": triton.next_power_of_2(most)}
    if p is None:
        _top_kernel[(rows * heads,)](scores, start, left_out, index, count, *sizes, budget, **lists)
        return index, count
    flags = torch.zeros(rows, heads, n_blocks, dtype=torch.int8, device=scores.device)
    queries = scores.shape[2]
    _share_kernel[(rows * heads * queries,)](
        scores, start, flags, heads, queries, n_blocks, width, room, size, p, scale,
        **shape,
    )  # fmt: skip
    _list_kernel[(rows * heads,)](flags, start, left_out, index, count, *sizes, **lists)
    return index, count


def _find_shape(n_blocks: int) -> dict[str, int]:
    room = triton.next_power_of_2(max(n_blocks, 16))
    return {"N": room, "num_warps": min(max(room // 256, 4), 16)}


def builds() -> list[Build]:
    kinds = {"scores": "*fp32", "start": "*i64", "left_out": "*i64", "index": "*i32"}
    kinds |= {"count": "*i32", "flags": "*i8", "budget": "fp32", "p": "fp32", "scale": "fp32"}
    all_builds = []
    for n_blocks in (512, 2048, WIDEST):
        shape = _find_shape(n_blocks)
        lists = {"N": shape["N"], "LIST": shape["N"]}
        registers = 65536 // (32 * shape["num_warps"])
        for kernel, constants in (
            (_top_kernel, lists), (_share_kernel, {"N": shape["N"]}), (_list_kernel, lists),
        ):  # fmt: skip
            all_builds.append(
                Build.of(kernel, kinds, constants, shape["num_warps"], 1, min(registers, 255))
            )
    return all_builds
