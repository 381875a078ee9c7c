"""Window attention in Triton: split over the keys, each key and value read once for all queries.

T. Dao, D. Haziza, F. Massa, G. Sizov, "Flash-Decoding for long-context inference", 2023, with the
running softmax of T. Dao et al., arXiv:2205.14135, algorithm 1. The W queries of all heads that
share a key head are the rows of one tile, so that a tile of keys serves them all. A second kernel
merges the splits by their log-sum-exps. Where rows are ragged, `window_attention_even_triton`
shares the keys out instead.

A result from one split depends on nothing but its row, bit for bit: not on the batch. That is so
with `num_splits=1`, where the cache has fewer than `2 LEAST_KEYS` positions, or, where rows are not
ragged, the programs without splits are as many as `PROGRAMS` asks for. With `num_splits=1` it does
not depend on the width either: the smallest tile is taken for any.

Departures: split i takes the tiles i, i + splits, i + 2 splits, ... and not a run of them, so that
splits have equal work however far a row has got; their number comes from shapes alone, so that a
captured graph stays valid and results are reproducible. A split leaves its finished average and its
log-sum-exp and not the three unfinished sums: where there is one split, that is the result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.kernels.build import Build
from mmaccel.kernels.takes import CACHE, HEADS
from mmaccel.kernels.window_attention import Blocks
from mmaccel.kernels.window_attention_even_triton import (
    Launch,
    attend_evenly,
    build_others,
)
from mmaccel.kernels.window_attention_even_triton import build_attend as build_ragged
from mmaccel.kernels.window_attention_merge_triton import build_merge, make_shares, merge
from mmaccel.kernels.window_attention_tiles_triton import LOG2E, attend_to_tiles, store_share

PROGRAMS = 264  # two for each of an H200's 132 multiprocessors
LEAST_KEYS = 128  # a split's share of the cache is not smaller
MOST_SPLITS = 32


TAKES = {"q": HEADS, "k": CACHE, "v": CACHE}


class Shape(NamedTuple):
    """Tile of a program: query rows, keys; and how it is compiled.

    Registers are the most that Triton 3.6, 3.7 and 3.9 take on sm_80 and sm_90, and the most where
    rows are ragged; they are given out by eights, so that 144 are no more than 140.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int
    ragged: int = 0


# (bytes of a number, padded head width) -> shapes, the smallest that holds all rows is taken
TABLE = {
    (2, 64): (Shape(16, 64, 4, 2, 128, 168), Shape(64, 32, 8, 2, 224, 240)),
    (2, 128): (Shape(16, 32, 4, 3, 140, 168), Shape(64, 32, 8, 2, 218, 222)),
    (2, 256): (Shape(16, 32, 4, 2, 200, 200),),
    (4, 128): (Shape(16, 32, 8, 3, 80, 80),),
}


def find_shape(
    table: dict[tuple[int, int], tuple[Shape, ...]], itemsize: int, block: int, packed: int
) -> Shape:
    """The tile for numbers of a size, a padded head width and a number of packed query rows."""
    if itemsize == 4 or block < 64:
        block = max(block, 64) if itemsize == 2 else 128
    shapes = table[itemsize, block]
    return next((shape for shape in shapes if shape.rows >= packed), shapes[-1])


def count_splits(capacity: int, programs: int) -> int:
    """Into how many parts the keys are split: a function of shapes only, a power of two.

    The programs are 3/4 to 3/2 of `PROGRAMS`, as near as doubling brings them: one round of 200 is
    done sooner than two of 400.
    """
    splits = 1
    while (
        splits < MOST_SPLITS
        and 4 * programs * splits <= 3 * PROGRAMS
        and capacity >= 2 * splits * LEAST_KEYS
    ):
        splits *= 2
    return splits


def count_programs(capacity: int, units: int) -> int:
    """How many programs share the keys of ragged rows, by shapes only; 0: keys are not split."""
    if capacity < 2 * LEAST_KEYS:
        return 0
    return min(PROGRAMS, units * (capacity // LEAST_KEYS))


@triton.jit
def _attend_kernel(  # type: ignore[no-untyped-def]
    q, k, v, start, tree, index, count, out, lse,
    q_row, q_head, q_step, k_row, k_head, k_step, v_row, v_head, v_step, tree_row, part,
    heads, group, width, tiles, capacity, head, value_head,
    n_blocks, block_size, window, scale, cap,
    CAPPED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    split = tl.program_id(1)
    sums, top, total = attend_to_tiles(
        q, k, v, start, tree, index, count,
        q_row, q_head, q_step, k_row, k_head, k_step, v_row, v_head, v_step, tree_row,
        heads, group, width, capacity, head, value_head,
        n_blocks, block_size, window, scale, cap,
        pair, tile, split, None, tl.num_programs(1), CAPPED, M, N, D, DV,
    )  # fmt: skip
    store_share(
        out, lse, sums, top, total, (pair // heads).to(tl.int64), (pair % heads).to(tl.int64),
        tile * M + tl.arange(0, M), split, part, heads, group, width, value_head, DV,
    )  # fmt: skip


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    tree: Tensor | None = None,
    blocks: Blocks | None = None,
    ragged: bool = False,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Results are views of `[R, W, Hq, Dv]` memory.

    Cost: one launch, or two where keys are split; float32 averages of the splits
    `[splits, R, W, Hq, Dv]`. For ragged rows see `attend_evenly`.
    """
    (rows, query_heads, width, head), (heads, room) = q.shape, k.shape[1:3]
    group = query_heads // heads
    value_head = v.shape[-1]
    q = q if q.stride(-1) == 1 else q.contiguous()
    block, value_block = (max(16, triton.next_power_of_2(n)) for n in (head, value_head))
    packed = 1 if num_splits == 1 else width * group
    shape = find_shape(TABLE, q.element_size(), max(block, value_block), packed)
    tiles = triton.cdiv(width * group, shape.rows)
    bits = None if tree is None else tree.contiguous().view(torch.uint8)
    index = None
    count = None
    size = 1
    n_blocks = 0
    if blocks is not None:
        index = blocks.index.contiguous()
        count = blocks.count.contiguous()
        size = blocks.size
        n_blocks = index.shape[2]
    launch = Launch(
        (q, k, v, start.contiguous(), bits, index, count),
        (
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            0 if tree is None or tree.ndim == 2 else width * width,
        ),
        heads, group, width, tiles, room, head, value_head,
        (
            n_blocks, size, 2**30 if window is None else window,
            scale * LOG2E if softcap is None else scale / softcap, (softcap or 0.0) * LOG2E,
        ),
        {
            "CAPPED": softcap is not None, "M": shape.rows, "N": shape.keys, "D": block,
            "DV": value_block, "num_warps": shape.warps, "num_stages": shape.stages,
        },
    )  # fmt: skip
    out = torch.empty(rows, width, query_heads, value_head, dtype=q.dtype, device=q.device)
    logs = torch.empty(rows, width, query_heads, dtype=torch.float32, device=q.device)
    units = rows * heads * tiles
    programs = count_programs(room, units) if ragged and num_splits is None else 0
    if programs:
        attend_evenly(launch, out, logs, programs=programs, least=LEAST_KEYS // shape.keys)
    else:
        _attend_in_splits(launch, out, logs, num_splits or count_splits(room, units))
    return out.transpose(1, 2), logs.transpose(1, 2)


def _attend_in_splits(launch: Launch, out: Tensor, lse: Tensor, splits: int) -> None:
    units = len(out) * launch.heads * launch.tiles
    shares, parts = make_shares(out, lse, splits)
    _attend_kernel[(units, splits)](
        *launch.tensors, shares, parts, *launch.strides, lse.numel(),
        launch.heads, launch.group, launch.width, launch.tiles,
        launch.capacity, launch.head, launch.value_head, *launch.restrictions, **launch.constants,
    )  # fmt: skip
    if splits > 1:
        merge(shares, parts, out, lse)


def builds() -> list[Build]:
    attend_builds = []
    ragged = []
    for (itemsize, block), shapes in TABLE.items():
        for shape in shapes:
            for restriction in ("tree", "blocks", ""):
                build = _build_attend(itemsize, block, shape, restriction)
                attend_builds.append(build)
                ragged.append(build_ragged(build, shape.ragged))
    return [*attend_builds, build_merge(), *ragged, *build_others()]


def _build_attend(itemsize: int, block: int, shape: Shape, restriction: str) -> Build:
    """A call gives None for restrictions that it does not have, which makes it another program."""
    number = "*fp32" if itemsize == 4 else "*bf16"
    kinds = {
        **dict.fromkeys(("q", "k", "v"), number),
        **dict.fromkeys(("index", "count"), "*i32"),
        **dict.fromkeys(("out", "lse"), "*fp32"),
        **dict.fromkeys(("scale", "cap"), "fp32"),
        "start": "*i64",
        "tree": "*u8",
    }
    constants: dict[str, Any] = {
        "CAPPED": bool(restriction),
        "M": shape.rows,
        "N": shape.keys,
        "D": block,
        "DV": block,
    }
    if restriction != "tree":
        constants |= {"tree": None}
    if restriction != "blocks":
        constants |= {"index": None, "count": None, "block_size": 1}
    kernel = _attend_kernel
    wide = [name for name in kernel.arg_names if name.endswith(("_row", "_head", "_step"))]
    return Build.of(
        kernel, kinds, constants, shape.warps, shape.stages, shape.registers, (*wide, "head")
    )
