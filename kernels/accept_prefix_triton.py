"""The end of a pass in Triton, one program; total variation is added in another order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.kernels.accept_prefix import RowState
from mmaccel.kernels.build import Build
from mmaccel.kernels.takes import Takes

SLOTS = 1024  # at a time
ROWS = 256  # at a time, at most
WARPS = 8


TAKES = {name: Takes() for name in ("new", "peak", "variation", "state.tokens")}


@triton.jit
def _accept_prefix_kernel(  # type: ignore[no-untyped-def]
    new, kept, peak, variation, tokens, n_generated, filled, ended, n_new, is_bad, passes, gains,
    spent, summary, limit, stops, new_step, kept_step, peak_step, variation_step, token_step,
    batch, width, n_stops, origin, capacity, COUNTS: tl.constexpr, B: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    j = tl.arange(0, W)[None, :]
    most = tl.load(limit)
    most_missing, n_open = most * 0, most * 0
    n_tokens, n_bad = most * 0, most * 0
    for first in range(0, batch, B):
        row = first + tl.arange(0, B)
        is_row = row < batch
        slots = is_row[:, None] & (j < width)
        drafts = is_row[:, None] & (j < width - 1)
        at = row.to(tl.int64)[:, None]
        before = tl.load(n_generated + row, mask=is_row, other=0)
        is_over = tl.load(ended + row, mask=is_row, other=1) != 0
        token = tl.load(new + at * new_step + j, mask=slots, other=0)
        is_kept = tl.load(kept + at * kept_step + j, mask=drafts, other=0) != 0
        n = tl.min(tl.where(is_kept, W, j), 1) + 1  # [B]
        n = tl.minimum(n, most - before)
        n = tl.where(is_over, 0, n)
        end = tl.full((B,), W, tl.int32)  # the slot of a stop token
        if stops is not None:
            is_stop = slots & False
            for s in range(0, n_stops):
                is_stop = is_stop | (token == tl.load(stops + s))
            end = tl.min(tl.where(is_stop & (j < n[:, None]), j, W), 1)
            n = tl.minimum(n, end + 1)
        score = tl.load(peak + at * peak_step + j, mask=slots, other=0.0).to(tl.float32)
        wrong = slots & ((score != score) | (tl.abs(score) == float("inf")))
        n_valid = tl.min(tl.where(wrong, j, W), 1)
        bad = (n_valid < n).to(tl.int32) | tl.load(is_bad + row, mask=is_row, other=0)
        n = tl.minimum(n, n_valid)
        is_new = slots & (j < n[:, None])
        after = before + n
        closed = is_over | (end < n) | (after >= most)
        if COUNTS:
            count = tl.load(passes + row, mask=is_row, other=0)
        tl.debug_barrier()  # what was read is written now
        column = origin + before[:, None] + j
        token = tl.where(is_over[:, None], 0, token)
        tl.store(tokens + at * token_step + column, token, mask=slots)
        tl.store(filled + row, origin + before + width, mask=is_row)
        tl.store(n_generated + row, after, mask=is_row)
        tl.store(ended + row, closed.to(tl.uint8), mask=is_row)
        tl.store(is_bad + row, bad.to(tl.uint8), mask=is_row)
        tl.store(n_new + row, n, mask=is_row)
        if COUNTS:
            place = tl.minimum(count, capacity - 1)
            tl.store(gains + place * batch + row, n, mask=is_row)
            tl.store(passes + row, count + 1, mask=is_row)
            if variation is not None:
                share = tl.load(variation + at * variation_step + j, mask=drafts & is_new, other=0)
                charged = tl.load(spent + row, mask=is_row, other=0)
                charged += tl.sum(share.to(tl.float64), 1)
                tl.debug_barrier()
                tl.store(spent + row, charged, mask=is_row)
            missing = tl.where(is_row & (closed == 0), most - after, 0)
            most_missing = tl.maximum(most_missing, tl.max(missing, 0))
            n_open += tl.sum((missing > 0).to(tl.int64), 0)
            n_tokens += tl.sum(tl.where(is_row, after, 0), 0)
            n_bad = n_bad | tl.max(tl.where(missing > 0, bad, 0), 0).to(tl.int64)
    if COUNTS:
        tl.store(summary, most_missing)
        tl.store(summary + 1, n_open)
        tl.store(summary + 2, n_tokens)
        tl.store(summary + 3, n_bad)


def accept_prefix(
    new: Tensor,
    kept: Tensor,
    peak: Tensor,
    variation: Tensor | None,
    state: RowState,
    limit: Tensor,
    stops: Tensor | None,
    *,
    origin: int,
    counts: bool,
) -> None:
    batch, width = new.shape
    if not batch:
        return
    block = triton.next_power_of_2(width)
    flags = [flag.view(torch.uint8) for flag in (kept.contiguous(), state.ended, state.is_bad)]
    _accept_prefix_kernel[(1,)](
        new, flags[0], peak, variation, state.tokens, state.n_generated, state.filled, flags[1],
        state.n_new, flags[2], state.passes, state.gains, state.spent, state.summary, limit, stops,
        new.stride(0), flags[0].stride(0), peak.stride(0),
        0 if variation is None else variation.stride(0), state.tokens.stride(0), batch, width,
        0 if stops is None else len(stops), origin, len(state.gains), COUNTS=counts,
        B=max(1, min(SLOTS // block, ROWS, triton.next_power_of_2(batch))), W=block,
        num_warps=WARPS,
    )  # fmt: skip


def builds() -> list[Build]:
    """One slot of many rows, 64 of some, and as many as a program takes at a time."""
    return [_build(rows, width) for rows, width in ((ROWS, 1), (16, 64), (1, 1024))]


def _build(rows: int, width: int) -> Build:
    kernel = _accept_prefix_kernel
    kinds = dict.fromkeys(("kept", "ended", "is_bad"), "*u8") | {"spent": "*fp64"}
    kinds |= dict.fromkeys(("peak", "variation"), "*fp32")
    numbers = ("batch", "width", "n_stops", "origin", "capacity")
    steps = [name for name in kernel.arg_names if name.endswith("_step")]
    kinds |= dict.fromkeys((*numbers, *steps), "i32")
    constants = {"COUNTS": True, "B": rows, "W": width}
    return Build.of(kernel, kinds, constants, WARPS, 2, 168, other="*i64")
