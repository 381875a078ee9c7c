"""Attention on packed entries in Triton: codes are unpacked in registers, each read once.

Split over the keys as `window_attention_triton`. A tile of keys is of one group, and entries whose
codes share bytes follow each other in it. After its share of the packed entries a program attends
to its share of the ring. Rows of different lengths have as many splits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.kernels.build import Build
from mmaccel.kernels.pack_group import Packed
from mmaccel.kernels.takes import CACHE, CODES, HEADS, Takes
from mmaccel.kernels.window_attention_merge_triton import make_shares, merge
from mmaccel.kernels.window_attention_tiles_triton import (
    LOG2E,
    add_values,
    load_queries,
    store_share,
    weigh_keys,
)
from mmaccel.kernels.window_attention_triton import Shape, count_splits, find_shape

TAKES = {
    "q": HEADS,
    "k": CACHE,
    "v": CACHE,
    "packed.keys.codes": CODES,
    "packed.values.codes": CODES,
    "packed.keys.scale": Takes(like="q"),
    "packed.values.scale": Takes(like="q"),
}
# as that of `window_attention_triton`; a tile of unpacked keys leaves no registers for more stages
_TABLE = {
    (2, 64): (Shape(16, 64, 4, 2, 168), Shape(64, 32, 8, 1, 184)),
    (2, 128): (Shape(16, 32, 4, 2, 168), Shape(64, 32, 8, 1, 255)),
    (2, 256): (Shape(16, 32, 4, 2, 232),),
    (4, 128): (Shape(16, 32, 8, 1, 112),),
}


@triton.jit
def _decode(codes, shift, scale, least, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers of the scale's dtype; a byte's code begins at a bit."""
    if BITS < 8:
        codes = (codes.to(tl.int32) >> shift) & (2**BITS - 1)
    return codes.to(scale.dtype) * scale + least


@triton.jit
def _attend_kernel(  # type: ignore[no-untyped-def]
    q, k, v, start, count, reads_next,
    k_codes, k_scale, k_least, v_codes, v_scale, v_least, out, lse,
    q_row, q_head, q_step, k_row, k_head, k_step, v_row, v_head, v_step, part,
    heads, group, width, tiles, room, head, value_head, n_groups, size, scale, cap,
    CAPPED: tl.constexpr, BITS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    split = tl.program_id(1)
    row = (pair // heads).to(tl.int64)
    key_head = (pair % heads).to(tl.int64)
    packed = tile * M + tl.arange(0, M)
    w = packed // group
    d, dv, lane = tl.arange(0, D), tl.arange(0, DV), tl.arange(0, N)
    queries = load_queries(q, row, key_head, packed, group, width, q_row, q_head, q_step, head, D)
    first_position = tl.load(start + row).to(tl.int32)
    position = first_position + w
    n_packed = tl.load(count + row).to(tl.int32)
    behind = n_packed + tl.zeros([M], tl.int32)  # where entries begin that are read as they are
    if reads_next is not None:
        is_next = tl.load(reads_next + row * width + w, mask=w < width, other=0) != 0
        behind += tl.where(is_next, size, 0)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, DV], tl.float32)

    n_bytes = size * BITS // 8
    first_group = pair.to(tl.int64) * n_groups
    k_codes += first_group * n_bytes * head
    k_scale += first_group * head
    k_least += first_group * head
    v_codes += first_group * n_bytes * value_head
    v_scale += first_group * size
    v_least += first_group * size
    per_group = tl.cdiv(size, N)
    n_read = tl.max(behind, 0) // size
    for step in range(split, n_read * per_group, tl.num_programs(1)):
        number_of = step // per_group
        place = step % per_group * N + lane
        is_key = place < size
        byte = number_of * n_bytes + place // (8 // BITS)
        shift = place % (8 // BITS) * BITS
        entry = byte % n_bytes + place % (8 // BITS) * n_bytes  # of the group
        seen = is_key[None, :] & (number_of * size < behind)[:, None]
        codes = tl.load(
            k_codes + (byte[None, :] * head + d[:, None]),
            mask=is_key[None, :] & (d < head)[:, None],
            other=0,
        )
        steps = tl.load(k_scale + number_of * head + d, mask=d < head, other=0.0)
        least = tl.load(k_least + number_of * head + d, mask=d < head, other=0.0)
        keys = _decode(codes, shift[None, :], steps[:, None], least[:, None], BITS)
        weights, top, decay = weigh_keys(queries, keys, seen, top, scale, cap, CAPPED)
        codes = tl.load(
            v_codes + (byte[:, None] * value_head + dv[None, :]),
            mask=is_key[:, None] & (dv < value_head)[None, :],
            other=0,
        )
        steps = tl.load(v_scale + number_of * size + entry, mask=is_key, other=0.0)
        least = tl.load(v_least + number_of * size + entry, mask=is_key, other=0.0)
        values = _decode(codes, shift[:, None], steps[:, None], least[:, None], BITS)
        sums, total = add_values(sums, total, weights, decay, values)

    k += row * k_row + key_head * k_head
    v += row * v_row + key_head * v_head
    last = first_position + width  # what no query sees may be NaN
    for step in range(split, tl.cdiv(room, N), tl.num_programs(1)):
        slot = step * N + lane
        n = n_packed + (slot + room - n_packed % room) % room
        is_key = (slot < room) & (n < last)
        seen = (n[None, :] >= behind[:, None]) & (n[None, :] <= position[:, None])
        keys = tl.load(
            k + (slot[None, :] * k_step + d[:, None]),
            mask=is_key[None, :] & (d < head)[:, None],
            other=0.0,
        )
        seen = seen & is_key[None, :]
        weights, top, decay = weigh_keys(queries, keys, seen, top, scale, cap, CAPPED)
        values = tl.load(
            v + (slot[:, None] * v_step + dv[None, :]),
            mask=is_key[:, None] & (dv < value_head)[None, :],
            other=0.0,
        )
        sums, total = add_values(sums, total, weights, decay, values)
    store_share(
        out, lse, sums, top, total, row, key_head, packed, split, part,
        heads, group, width, value_head, DV,
    )  # fmt: skip


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    packed: Packed,
    reads_next: Tensor | None = None,
    *,
    scale: float,
    softcap: float | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Results are views of `[R, W, Hq, Dv]` memory. Cost: as of `window_attention_triton`."""
    (rows, query_heads, width, head), (heads, room) = q.shape, k.shape[1:3]
    group = query_heads // heads
    value_head = v.shape[-1]
    q = q if q.stride(-1) == 1 else q.contiguous()
    block, value_block = (max(16, triton.next_power_of_2(n)) for n in (head, value_head))
    shape = find_shape(_TABLE, q.element_size(), max(block, value_block), width * group)
    tiles = triton.cdiv(width * group, shape.rows)
    units = rows * heads * tiles
    n_groups = packed.keys.codes.shape[2]
    splits = num_splits or count_splits(n_groups * packed.size + room, units)
    out = torch.empty(rows, width, query_heads, value_head, dtype=q.dtype, device=q.device)
    logs = torch.empty(rows, width, query_heads, dtype=torch.float32, device=q.device)
    shares, parts = make_shares(out, logs, splits)
    bits = None if reads_next is None else reads_next.contiguous().view(torch.uint8)
    _attend_kernel[(units, splits)](
        q, k, v, start.contiguous(), packed.count, bits,
        *packed.keys.parts(), *packed.values.parts(), shares, parts,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], logs.numel(),
        heads, group, width, tiles, room, head, value_head, n_groups, packed.size,
        scale * LOG2E if softcap is None else scale / softcap, (softcap or 0.0) * LOG2E,
        CAPPED=softcap is not None, BITS=packed.bits, M=shape.rows, N=shape.keys, D=block,
        DV=value_block, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    if splits > 1:
        merge(shares, parts, out, logs)
    return out.transpose(1, 2), logs.transpose(1, 2)


def builds() -> list[Build]:
    return [
        _build(*kind, shape, bits)
        for kind, shapes in _TABLE.items()
        for shape in shapes
        for bits in (4, 8)
    ]


def _build(itemsize: int, block: int, shape: Shape, bits: int) -> Build:
    """Of 8 bits without softcap and queries that read the next group."""
    number = "*fp32" if itemsize == 4 else "*bf16"
    kinds = dict.fromkeys(("q", "k", "v", "k_scale", "k_least", "v_scale", "v_least"), number)
    kinds |= dict.fromkeys(("k_codes", "v_codes", "reads_next"), "*u8")
    kinds |= dict.fromkeys(("start", "count"), "*i64") | dict.fromkeys(("out", "lse"), "*fp32")
    kinds |= dict.fromkeys(("scale", "cap"), "fp32")
    constants: dict[str, Any] = {
        "CAPPED": bits == 4, "BITS": bits, "M": shape.rows, "N": shape.keys, "D": block, "DV": block
    }  # fmt: skip
    if bits == 8:
        constants |= {"reads_next": None}
    names = _attend_kernel.arg_names
    wide = [name for name in names if name.endswith(("_row", "_head", "_step"))]
    return Build.of(
        _attend_kernel,
        kinds,
        constants,
        shape.warps,
        shape.stages,
        shape.registers,
        (*wide, "head"),
    )
