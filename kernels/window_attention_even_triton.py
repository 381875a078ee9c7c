"""Window attention with an even share of the keys of all rows and heads for every program.

R. Sanovar et al., "Lean Attention: Hardware-aware scalable attention mechanism for the decode-phase
of transformers", 2024 (arXiv:2405.10480). The tiles of keys of all units (a key head of a row with
a tile of its queries) stand in one line, the program p takes the p-th part of it, and a unit that
several programs have worked at is merged by log-sum-exps. So no program waits for another one that
has more keys.

The number of programs comes from shapes alone; where parts begin is computed on the device, so that
a captured graph stays valid. Program plus unit number names a part, as both grow along the line:
there are programs + units places for results.

Departures: the paper's programs merge what they have themselves; here a kernel does, as for other
splits. A part has `least` tiles or more, so that a short batch has few parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.kernels.build import Build
from mmaccel.kernels.window_attention_merge_triton import ROWS, WARPS, combine
from mmaccel.kernels.window_attention_tiles_triton import attend_to_tiles, find_keys

UNITS = 256  # that are looked at together


@triton.jit
def _plan_kernel(  # type: ignore[no-untyped-def]
    start, count, ends, heads, group, width, tiles, units, capacity, n_blocks, block_size, window,
    M: tl.constexpr, N: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    before = tl.full([], 0, tl.int32)
    for first in range(0, units, UNITS):
        unit = first + tl.arange(0, UNITS)
        is_unit = unit < units
        known = tl.minimum(unit, units - 1)
        pair = known // tiles
        first_position = tl.load(start + pair // heads).to(tl.int32)
        begin, listed, _ = find_keys(
            first_position, count, pair, known % tiles, group, width, capacity, n_blocks,
            block_size, window, M, N,
        )  # fmt: skip
        n_tiles = tl.where(is_unit, tl.maximum(tl.cdiv(listed, N) - begin, 0), 0)
        tl.store(ends + unit, before + tl.cumsum(n_tiles, 0), mask=is_unit)
        before += tl.sum(n_tiles, 0)


@triton.jit
def _count_before(ends, units, tile, UNITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many units end at a tile of the line or before it."""
    n_before = tl.full([], 0, tl.int32)
    for first in range(0, units, UNITS):
        unit = first + tl.arange(0, UNITS)
        end = tl.load(ends + unit, mask=unit < units, other=2**31 - 1)
        n_before += tl.sum((end <= tile).to(tl.int32), 0)
    return n_before


@triton.jit
def _find_share(ends, units, programs, least):  # type: ignore[no-untyped-def]
    """How many tiles a program takes."""
    return tl.maximum(tl.cdiv(tl.load(ends + units - 1), programs), least)


@triton.jit
def _attend_kernel(  # type: ignore[no-untyped-def]
    q, k, v, start, tree, index, count, ends, out, lse,
    q_row, q_head, q_step, k_row, k_head, k_step, v_row, v_head, v_step, tree_row,
    heads, group, width, tiles, units, least, capacity, head, value_head,
    n_blocks, block_size, window, scale, cap,
    CAPPED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    share = _find_share(ends, units, tl.num_programs(0), least)
    first = program * share
    behind = tl.minimum(first + share, tl.load(ends + units - 1))
    if first < behind:
        first_unit = _count_before(ends, units, first, UNITS)
        last_unit = _count_before(ends, units, behind - 1, UNITS)
        # disable_licm: what a unit needs is computed anew for the next one, in fewer registers
        for unit in tl.range(first_unit, last_unit + 1, disable_licm=True):
            begin = tl.load(ends + unit - 1, mask=unit > 0, other=0)
            end = tl.load(ends + unit)
            sums, top, total = attend_to_tiles(
                q, k, v, start, tree, index, count,
                q_row, q_head, q_step, k_row, k_head, k_step, v_row, v_head, v_step, tree_row,
                heads, group, width, capacity, head, value_head,
                n_blocks, block_size, window, scale, cap,
                unit // tiles, unit % tiles,
                tl.maximum(first, begin) - begin, tl.minimum(behind, end) - begin, 1,
                CAPPED, M, N, D, DV,
            )  # fmt: skip
            total = tl.where(top == float("-inf"), 1.0, total)  # sees nothing: 0, and -inf
            average = sums / total[:, None]
            line = (program + unit).to(tl.int64) * M + tl.arange(0, M)
            dv = tl.arange(0, DV)
            tl.store(lse + line, (top + tl.log2(total)) * 0.6931471805599453)
            tl.store(
                out + line[:, None] * value_head + dv[None, :],
                average,
                mask=(dv < value_head)[None, :],
            )


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    shares, logs, ends, out, lse, heads, group, width, tiles, units, programs, least, value_head,
    M: tl.constexpr, ROWS: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0)
    share = _find_share(ends, units, programs, least)
    begin = tl.load(ends + unit - 1, mask=unit > 0, other=0)
    end = tl.load(ends + unit)
    first = begin // share
    parts = tl.where(end > begin, (end - 1) // share - first + 1, 0)
    packed = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # rows of the unit's tile
    at = (first + unit).to(tl.int64) * M + packed
    dv = tl.arange(0, DV)
    is_value = (dv < value_head)[None, :]
    average, log = combine(shares, logs, at, M, parts, packed < M, is_value, value_head, ROWS, DV)
    packed += unit % tiles * M
    is_row = packed < width * group
    pair = unit // tiles
    first_line = (pair // heads).to(tl.int64) * width * heads * group + pair % heads * group
    line = first_line + packed + packed // group * ((heads - 1) * group)
    tl.store(lse + line, log, mask=is_row)
    tl.store(
        out + line[:, None] * value_head + dv[None, :], average, mask=is_row[:, None] & is_value
    )


class Launch(NamedTuple):
    """Arguments that kernels of window attention have in common."""

    tensors: tuple[Tensor | None, ...]
    strides: tuple[int, ...]
    heads: int
    group: int
    width: int
    tiles: int
    capacity: int
    head: int
    value_head: int
    restrictions: tuple[int | float, ...]
    constants: dict[str, Any]


def plan_tiles(launch: Launch) -> Tensor:
    """Where the tiles of keys of each unit end in the line of all, `[units]` int32."""
    start = launch.tensors[3]
    count = launch.tensors[6]
    assert start is not None
    units = len(start) * launch.heads * launch.tiles
    n_blocks, block_size, window = launch.restrictions[:3]
    ends = torch.empty(units, dtype=torch.int32, device=start.device)
    _plan_kernel[(1,)](
        start, count, ends, launch.heads, launch.group, launch.width, launch.tiles, units,
        launch.capacity, n_blocks, block_size, window,
        M=launch.constants["M"], N=launch.constants["N"], UNITS=UNITS,
    )  # fmt: skip
    return ends


def attend_evenly(launch: Launch, out: Tensor, lse: Tensor, *, programs: int, least: int) -> None:
    """Write the attention of all rows to `out` `[R, W, Hq, Dv]` and `lse` `[R, W, Hq]` float32,
    both contiguous; a program takes `least` tiles or more.

    Cost: three launches; float32 averages `[programs + units, M, Dv]`, where a unit is a key head
    of a row with a tile of its queries.
    """
    rows = launch.constants["M"]
    ends = plan_tiles(launch)
    units = len(ends)
    sizes = (launch.heads, launch.group, launch.width, launch.tiles, units)
    parts = programs + units
    shares = torch.empty(parts, rows, launch.value_head, dtype=torch.float32, device=out.device)
    logs = torch.empty(parts, rows, dtype=torch.float32, device=out.device)
    _attend_kernel[(programs,)](
        *launch.tensors, ends, shares, logs, *launch.strides, *sizes, least,
        launch.capacity, launch.head, launch.value_head, *launch.restrictions,
        **launch.constants, UNITS=UNITS,
    )  # fmt: skip
    _merge_kernel[(units, rows // ROWS)](
        shares, logs, ends, out, lse, *sizes, programs, least, launch.value_head,
        M=rows, ROWS=ROWS, DV=launch.constants["DV"], num_warps=WARPS,
    )  # fmt: skip


def build_attend(strided: Build, registers: int) -> Build:
    """The kernel for a way in which that of `window_attention` is compiled."""
    kinds = {**strided.signature, "ends": "*i32"}
    constants = {**strided.constants, "UNITS": UNITS}
    wide = [name for name in strided.divisible if not kinds[name].startswith("*")]
    return Build.of(
        _attend_kernel, kinds, constants, strided.warps, strided.stages, registers, wide
    )


def build_others() -> list[Build]:
    """The plan, with lists of blocks and without, and the merge."""
    kinds = {"start": "*i64", "count": "*i32", "ends": "*i32", "shares": "*fp32", "logs": "*fp32"}
    kinds |= {"out": "*bf16", "lse": "*fp32"}
    lists: dict[str, Any] = {"M": 64, "N": 32, "UNITS": UNITS}
    plain = lists | {"count": None, "block_size": 1}
    merged = {"M": 64, "ROWS": ROWS, "DV": 256}
    return [
        Build.of(_plan_kernel, kinds, lists, WARPS, 2, 128),
        Build.of(_plan_kernel, kinds, plain, WARPS, 2, 128),
        Build.of(_merge_kernel, kinds, merged, WARPS, 2, 128, ["value_head"]),
    ]
