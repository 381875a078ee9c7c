"""Column mass in Triton: a tile of keys is read once for all queries of its head. A program owns
its columns and walks over the queries: sums have one order, and nothing is added atomically.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.kernels.build import Build
from mmaccel.kernels.takes import CACHE, HEADS
from mmaccel.kernels.window_attention_tiles_triton import LOG2E
from mmaccel.kernels.window_attention_triton import Shape

TAKES = {"q": HEADS, "k": CACHE}


# (bytes of a number, most numbers a head) -> shape
TABLE = {
    (2, 128): Shape(16, 64, 4, 2, 168),
    (2, 256): Shape(16, 64, 4, 2, 200),
    (4, 128): Shape(16, 32, 4, 2, 168),
}


@triton.jit
def _mass_kernel(  # type: ignore[no-untyped-def]
    q, k, lse, start, weights, out,
    q_row, q_head, q_step, k_row, k_head, k_step, heads, group, width, room, head, scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    row = (pair // heads).to(tl.int64)
    key_head = (pair % heads).to(tl.int64)
    n = tl.program_id(1) * N + tl.arange(0, N)
    d = tl.arange(0, D)
    first_position = tl.load(start + row).to(tl.int32)
    is_key = n < tl.minimum(first_position + width, room)
    k += row * k_row + key_head * k_head
    keys = tl.load(
        k + (n[None, :] * k_step + d[:, None]),
        mask=is_key[None, :] & (d < head)[:, None],
        other=0.0,
    )
    packed_rows = width * group
    # a tile of keys after the row's last query meets no query
    packed_rows = tl.where(tl.program_id(1) * N < first_position + width, packed_rows, 0)
    mass = tl.zeros([N], tl.float32)
    for step in range(0, tl.cdiv(packed_rows, M)):
        packed = step * M + tl.arange(0, M)
        is_row = packed < packed_rows
        w = packed // group
        query_head = key_head * group + packed % group
        at = row * q_row + query_head * q_head + w.to(tl.int64) * q_step
        queries = tl.load(
            q + at[:, None] + d[None, :], mask=is_row[:, None] & (d < head)[None, :], other=0.0
        )
        line = (row * heads * group + query_head) * width + w
        total = tl.load(lse + line, mask=is_row, other=float("-inf"))
        weight = tl.where(total == float("-inf"), 0.0, 1.0)
        if weights is not None:
            weight *= tl.load(weights + row * width + w, mask=is_row, other=0.0).to(tl.float32)
        base = tl.where(total == float("-inf"), 0.0, total) * 1.4426950408889634
        scores = tl.dot(queries, keys, input_precision="ieee") * scale - base[:, None]
        seen = is_key[None, :] & (n[None, :] <= (first_position + w)[:, None])
        seen = seen & (total > float("-inf"))[:, None]
        attention = tl.exp2(tl.where(seen, scores, float("-inf")))
        mass += tl.sum(attention * weight[:, None], 0)
    tl.store(out + pair.to(tl.int64) * room + n, mass, mask=n < room)


def column_mass(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    start: Tensor,
    *,
    scale: float,
    weights: Tensor | None = None,
) -> Tensor:
    (rows, query_heads, width, head), (heads, room) = q.shape, k.shape[1:3]
    q = q if q.stride(-1) == 1 else q.contiguous()
    block = max(16, triton.next_power_of_2(head))
    shape = TABLE[q.element_size(), max(block, 128)]
    out = torch.empty(rows, heads, room, dtype=torch.float32, device=q.device)
    _mass_kernel[(rows * heads, triton.cdiv(room, shape.keys))](
        q, k, lse.contiguous(), start.contiguous(),
        weights if weights is None else weights.contiguous(), out, *q.stride()[:3],
        *k.stride()[:3], heads, query_heads // heads, width, room, head, scale * LOG2E,
        M=shape.rows, N=shape.keys, D=block, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return out


def builds() -> list[Build]:
    return [_build(itemsize, block, shape) for (itemsize, block), shape in TABLE.items()]


def _build(itemsize: int, block: int, shape: Shape) -> Build:
    number = "*fp32" if itemsize == 4 else "*bf16"
    kinds = dict.fromkeys(("lse", "weights", "out"), "*fp32") | {"start": "*i64", "scale": "fp32"}
    kinds |= {"q": number, "k": number}
    constants = {"M": shape.rows, "N": shape.keys, "D": block}
    wide = [name for name in _mass_kernel.arg_names if name.endswith(("_row", "_head", "_step"))]
    return Build.of(
        _mass_kernel, kinds, constants, shape.warps, shape.stages, shape.registers, (*wide, "head")
    )
