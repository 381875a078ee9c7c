"""Merges attention over parts of the keys: a part's average counts with
`exp(lse of the part - lse of all)`, the second step of T. Dao et al., "Flash-Decoding for
long-context inference", 2023.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.kernels.build import Build

ROWS = 16  # queries a program
WARPS = 4


@triton.jit
def combine(  # type: ignore[no-untyped-def]
    shares, logs, at, step, parts, is_line, is_value, value_head,
    ROWS: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """The average `[ROWS, DV]` and the log-sum-exp `[ROWS]` of all parts together; without parts 0,
    -inf. The first part of a line stands at `at`, the others `step` lines apart.
    """
    dv = tl.arange(0, DV)
    mask = is_line[:, None] & is_value
    top = tl.full([ROWS], float("-inf"), tl.float32)
    line = at
    for _ in range(parts):
        top = tl.maximum(top, tl.load(logs + line, mask=is_line, other=float("-inf")))
        line += step
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DV], tl.float32)
    line = at
    for _ in range(parts):
        log = tl.load(logs + line, mask=is_line, other=float("-inf"))
        weight = tl.exp2((log - base) * 1.4426950408889634)
        share = tl.load(shares + line[:, None] * value_head + dv[None, :], mask=mask, other=0.0)
        total += weight
        sums += weight[:, None] * share
        line += step
    total = tl.where(top == float("-inf"), 1.0, total)
    return sums / total[:, None], top + tl.log2(total) * 0.6931471805599453


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    shares, logs, out, lse, lines, splits, value_head, ROWS: tl.constexpr, DV: tl.constexpr
):
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_line = line < lines
    dv = tl.arange(0, DV)
    is_value = (dv < value_head)[None, :]
    share, log = combine(shares, logs, line, lines, splits, is_line, is_value, value_head, ROWS, DV)
    tl.store(lse + line, log, mask=is_line)
    tl.store(
        out + line[:, None] * value_head + dv[None, :], share, mask=is_line[:, None] & is_value
    )


def make_shares(out: Tensor, lse: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Where splits write, see `merge`; one alone writes the results."""
    if splits == 1:
        return out, lse
    shares = torch.empty(splits, *out.shape, dtype=torch.float32, device=out.device)
    return shares, torch.empty(splits, *lse.shape, dtype=torch.float32, device=out.device)


def merge(shares: Tensor, logs: Tensor, out: Tensor, lse: Tensor) -> None:
    """Write the attention over all keys, `out` `[R, W, Hq, Dv]` and `lse` `[R, W, Hq]` float32, of
    shares `[splits, R, W, Hq, Dv]` float32 and their log-sum-exps `[splits, R, W, Hq]`; where a
    part sees nothing 0 and -inf. All are contiguous.
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
    kinds = {"shares": "*fp32", "logs": "*fp32", "out": "*bf16", "lse": "*fp32"}
    return Build.of(_merge_kernel, kinds, {"ROWS": ROWS, "DV": 256}, WARPS, 2, 128, ["value_head"])
