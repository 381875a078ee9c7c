"""Merges attention over parts of the keys by the parts' log-sum-exps.

T. Dao, D. Haziza, F. Massa, G. Sizov, "Flash-Decoding for long-context inference", 2023, its second
step. A part's average counts with `exp(lse of the part - lse of all)`.

Departures: none.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mmaccel.kernels.build import Build

ROWS = 16  # queries a program
WARPS = 4


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    shares, logs, out, lse, lines, splits, value_head, ROWS: tl.constexpr, DV: tl.constexpr
):
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_line = line < lines
    dv = tl.arange(0, DV)
    mask = is_line[:, None] & (dv < value_head)[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    at = line
    for _ in range(splits):
        top = tl.maximum(top, tl.load(logs + at, mask=is_line, other=float("-inf")))
        at += lines
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DV], tl.float32)
    at = line
    for _ in range(splits):
        log = tl.load(logs + at, mask=is_line, other=float("-inf"))
        weight = tl.exp2((log - base) * 1.4426950408889634)
        share = tl.load(shares + at[:, None] * value_head + dv[None, :], mask=mask, other=0.0)
        total += weight
        sums += weight[:, None] * share
        at += lines
    total = tl.where(top == float("-inf"), 1.0, total)
    tl.store(lse + line, top + tl.log2(total) * 0.6931471805599453, mask=is_line)
    at = line[:, None] * value_head + dv[None, :]
    tl.store(out + at, sums / total[:, None], mask=mask)


def merge(shares: Tensor, logs: Tensor, out: Tensor, lse: Tensor) -> None:
    """Write the attention over all keys.

    Args:
        shares: `[splits, R, W, Hq, Dv]` float32, attention over each part; 0 where it sees nothing.
        logs: `[splits, R, W, Hq]` float32, log-sum-exp of each part; -inf where it sees nothing.
        out: `[R, W, Hq, Dv]`, written; contiguous like the others.
        lse: `[R, W, Hq]` float32, written.
    """
    lines = lse.numel()
    value_head = out.shape[-1]
    _merge_kernel[(triton.cdiv(lines, ROWS),)](
        shares,
        logs,
        out,
        lse,
        lines,
        len(shares),
        value_head,
        ROWS=ROWS,
        DV=max(16, triton.next_power_of_2(value_head)),
        num_warps=WARPS,
    )


def build_merge() -> Build:
    """The one configuration, at its widest values."""
    pointers = {"shares": "*fp32", "logs": "*fp32", "out": "*bf16", "lse": "*fp32"}
    numbers = dict.fromkeys(("lines", "splits", "value_head"), "i32")
    constants = {"ROWS": ROWS, "DV": 256}
    signature = {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}
    return Build(_merge_kernel, signature, constants, WARPS, 2, 128, (*pointers, "value_head"))
