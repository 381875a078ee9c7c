"""Parallel rounds of coarse drafts in Triton: one launch a round, one program a slot.

A slot reads the tokens of the round before and writes another copy, so that no program waits.
Neighbours as the pass saw them cost a comparison, corrected candidates their rows; all scores are
computed only where no pass has seen the slot. The first hidden layer goes through a scratch row, as
single entries are read from memory alone. No round is skipped: they can be captured.

Departures: products are summed in another order than torch's, so that near-ties may fall otherwise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.kernels.build import Build
from mmaccel.kernels.coarse_rounds import Redrafted, SweepSlots, SweepWeights
from mmaccel.kernels.takes import Takes

LANES = tl.constexpr(32)  # neighbours compared at a time
TILE = 8192  # numbers of a matrix at a time
WIDEST = 512  # hidden layer
_WARPS = 8  # of a program; with 4 or 16 some builds spill registers; no GPU has timed them
TAKES = {"weights.inner": Takes(widest=WIDEST, adjacent=False)}


@triton.jit
def _argmax_of_products(  # type: ignore[no-untyped-def]
    matrix,
    vector,
    offsets,
    ids,
    last,
    noise,
    gate,
    scale,
    n_rows,
    n_corrected,
    width,
    column,
    ROWS: tl.constexpr,
    IS_FRESH: tl.constexpr,
):
    """First of `n_rows` with the largest score.

    If `IS_FRESH`, rows are those of the matrix and a score is (row times vector + offset) times the
    scale + gate times the last score + noise. Otherwise rows are those of the ids and a score is
    row times vector times the scale, 0 from `n_corrected` on, + offset.
    """
    best = tl.full([ROWS], float("-inf"), tl.float32)
    index = tl.zeros([ROWS], tl.int32)
    for first in tl.range(0, n_rows, ROWS, disable_licm=True):
        row = first + tl.arange(0, ROWS)
        inside = row < n_rows
        entry = row.to(tl.int64)
        if not IS_FRESH:
            entry = tl.load(ids + row, mask=inside, other=0)
        tile = tl.load(
            matrix + entry[:, None] * width + column[None, :],
            mask=inside[:, None] & (column < width)[None, :],
            other=0.0,
        )
        score = tl.sum(tile * vector[None, :], 1)
        offset = tl.load(offsets + row, mask=inside, other=0.0)
        if IS_FRESH:
            older = tl.load(last + row, mask=inside, other=0.0)
            older = tl.where(older == float("-inf"), older, older * gate)
            score = (score + offset) * scale + older
            score += tl.load(noise + row, mask=inside, other=0.0)
        else:
            score = tl.where(row < n_corrected, score * scale, 0.0) + offset
        better = inside & (score > best)
        best = tl.where(better, score, best)
        index = tl.where(better, row, index)
    high = tl.max(best, 0)
    return tl.min(tl.where(best == high, index, n_rows - 1), 0)


@triton.jit
def _round_kernel(  # type: ignore[no-untyped-def]
    table, inner, inner_bias, head, head_bias, columns, neighbours, is_seen, is_fixed, seen, base,
    hidden_seen, ids, values, last, gates, noise, before, work, written, layer, drafts, n_slots,
    n_columns, n_neighbours, width, n_candidates, n_corrected, n_values, scale,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    batch_row = at // n_slots
    out = written + batch_row * n_columns + tl.load(columns + at)
    work += batch_row * n_columns
    layer += at * width
    last += batch_row * n_values
    h, lane, part = tl.arange(0, WIDTH), tl.arange(0, LANES), tl.arange(0, ROWS)
    inside = h < width
    around = at * n_neighbours
    draft = tl.load(before + at)
    # a slot whose neighbours are as the pass saw them keeps its draft
    changes = tl.zeros([LANES], tl.int32)
    for first in tl.range(0, n_neighbours, LANES, disable_licm=True):
        there = first + lane < n_neighbours
        where = tl.load(neighbours + around + first + lane, mask=there, other=0)
        now = tl.load(work + where, mask=there, other=0)
        was = tl.load(seen + around + first + lane, mask=there, other=0)
        changes += (now != was).to(tl.int32)
    was_seen = tl.load(is_seen + at)
    is_same = (was_seen != 0) & (tl.sum(changes, 0) == 0)
    if (tl.load(is_fixed + at) == 0) & (is_same == 0):
        # a = relu(base + sum_k table[k, token of neighbour k])
        total = tl.load(base + at * width + h, mask=inside, other=0.0)
        for first in range(0, n_neighbours, ROWS):
            neighbour = first + part
            there = neighbour < n_neighbours
            where = tl.load(neighbours + around + neighbour, mask=there, other=0)
            entry = tl.load(work + where, mask=there, other=0) + neighbour * (n_values + 1)
            tile = tl.load(
                table + entry[:, None] * width + h[None, :],
                mask=there[:, None] & inside[None, :],
                other=0.0,
            )
            total += tl.sum(tile, 0)
        low = tl.maximum(total, 0.0)
        tl.store(layer + h, low, mask=inside)
        tl.debug_barrier()  # all entries are written before any is read
        # h = a + relu(U a + b)
        total = tl.load(inner_bias + h, mask=inside, other=0.0)
        for first in range(0, width, ROWS):
            source = first + part
            there = source < width
            entry = tl.load(layer + source, mask=there, other=0.0)
            tile = tl.load(
                inner + source[:, None] * width + h[None, :],
                mask=there[:, None] & inside[None, :],
                other=0.0,
            )
            total += tl.sum(entry[:, None] * tile, 0)
        hidden = low + tl.maximum(total, 0.0)
        if was_seen != 0:
            change = hidden - tl.load(hidden_seen + at * width + h, mask=inside, other=0.0)
            among = at * n_candidates
            best = _argmax_of_products(
                head,
                change,
                values + among,
                ids + among,
                last,
                noise,
                0.0,
                scale,
                n_candidates,
                n_corrected,
                width,
                h,
                ROWS,
                False,
            )
            draft = tl.load(ids + among + best)
        else:
            best = _argmax_of_products(
                head,
                hidden,
                head_bias,
                ids,
                last,
                noise + at * n_values,
                tl.load(gates + at),
                scale,
                n_values,
                0,
                width,
                h,
                ROWS,
                True,
            )
            draft = best.to(tl.int64)
        tl.store(out, draft)  # here as well: held until the end, it spills registers
    tl.store(out, draft)
    tl.store(drafts + at, draft)


def coarse_rounds(
    weights: SweepWeights,
    slots: SweepSlots,
    work: Tensor,
    scale: float,
    n_corrected: int,
    rounds: int,
) -> Redrafted:
    """Cost: a launch a round."""
    batch, n_slots, n_candidates = slots.ids.shape
    before = work.gather(1, slots.columns)
    drafts = torch.empty_like(before)
    if not drafts.numel():
        return Redrafted(drafts, slots.seen)
    width = len(weights.inner)
    layer = torch.empty(batch * n_slots, width, dtype=torch.float32, device=work.device)
    given = slots._replace(
        is_seen=slots.is_seen.to(torch.uint8), is_fixed=slots.is_fixed.to(torch.uint8)
    )
    operands = [value.contiguous() for value in (*weights, *given)]
    # a round reads one copy of the tokens and writes the window's into the other
    tokens, other = work.contiguous().clone(), work.contiguous().clone()
    for number in range(rounds):
        if number:
            tokens, other = other, tokens
        _round_kernel[(batch * n_slots,)](
            *operands, before, tokens, other, layer, drafts, n_slots, tokens.stride(0),
            slots.neighbours.shape[2], width, n_candidates, n_corrected, len(weights.head), scale,
            **block_sizes(width), num_warps=_WARPS, num_stages=1,
        )  # fmt: skip
    read = tokens.gather(1, slots.neighbours.flatten(1)).view(slots.neighbours.shape)
    work.scatter_(1, slots.columns, drafts)
    return Redrafted(drafts, read)


def block_sizes(width: int) -> dict[str, int]:
    block = max(16, triton.next_power_of_2(width))
    return {"WIDTH": block, "ROWS": TILE // block}


def builds() -> list[Build]:
    """Every configuration this file launches: widths up to 16, 32 … 512."""
    ids = ("columns", "neighbours", "seen", "ids", "before", "work", "written", "drafts")
    numbers = (
        "n_slots", "n_columns", "n_neighbours", "width", "n_candidates", "n_corrected", "n_values",
    )  # fmt: skip
    kinds = dict.fromkeys(ids, "*i64") | dict.fromkeys(numbers, "i32")
    kinds |= {"is_seen": "*u8", "is_fixed": "*u8", "scale": "fp32"}
    widths = (16, 32, 64, 128, 256, 512)
    return [
        Build.of(_round_kernel, kinds, block_sizes(width), _WARPS, 1, 128, ["width"], other="*fp32")
        for width in widths
    ]
