"""Exact thresholds over long rows in Triton: radix descent by counting, several programs a row.

Idea: float32 scores have 32-bit integer keys in the same order. Top-k wants the largest key t that
at least k keys reach; top-p the largest t such that the mass of the keys reaching it is at least p.
Both are found four bits at a time: a level sums, for 16 keys in equal steps, the counts or masses
of the scores that reach them, one partial sum a split; the next level adds the splits up in a
fixed order, moves on to the last key that reached the target, and refines the steps. Nothing comes
back to the host, no atomics are used, and equal inputs give equal bits.

Method: radix selection, as in T. Alabi et al., "Fast k-Selection Algorithms for Graphics Processing
Units", ACM JEA 17, 2012, section 3, with sums in the place of histograms.

Departures: masses are exp(score - peak) without normalisation, in float32 and in an order of
additions of their own, so that a boundary of top-p within rounding of p may fall a token apart from
the specification's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

WAYS = tl.constexpr(16)  # keys a level tries
LEVELS = tl.constexpr(8)  # of four bits each
CHUNK = tl.constexpr(4096)  # tokens a program reads
TILE = tl.constexpr(128)  # of them at a time, against all keys
SPAN = tl.constexpr(512)  # tokens at a time where nothing is compared with many keys
PART = tl.constexpr(64)  # splits merged at a time
LOWEST = tl.constexpr(-(2**31))


class Memory(NamedTuple):
    """Scratch of one call, and its results."""

    peaks: Tensor  # [entries, splits] float32
    ties: Tensor  # [entries, splits] int32
    lows: Tensor  # [levels, entries] int32
    aboves: Tensor  # [levels, entries] float32
    sums: Tensor  # [levels, entries, splits, ways] float32
    floors: Tensor  # [2, entries] int32, of top-k and top-p
    last: Tensor  # [2, entries] float32, mass above top-p's floor and its target
    parts: tuple[Tensor, ...]  # best, peak and sum [3, entries, splits]; token [entries, splits]
    results: tuple[Tensor, ...]  # tokens, peak and lse: [entries]


def allocate(entries: int, n_splits: int, device: torch.device) -> Memory:
    """Scratch and results for `entries` rows of `n_splits` programs."""

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    levels, whole, split = LEVELS.value, torch.int32, (entries, n_splits)
    return Memory(
        make(*split), make(*split, dtype=whole), make(levels, entries, dtype=whole),
        make(levels, entries), make(levels, *split, WAYS.value), make(2, entries, dtype=whole),
        make(2, entries),
        (make(3, *split), make(*split, dtype=whole)),
        (make(entries, dtype=torch.int64), make(entries), make(entries)),
    )  # fmt: skip


@triton.jit
def load_scores(  # type: ignore[no-untyped-def]
    logits, mask, index, n_values, entry, width, row_stride, slot_stride, branch_stride,
    mask_row_stride, mask_slot_stride, has_mask, branches, scale, second_scale, temperature,
):  # fmt: skip
    """Scores after guidance, mask and temperature; -inf behind the row's end and no -0."""
    row, slot = (entry // width).to(tl.int64), (entry % width).to(tl.int64)
    valid = index < n_values
    place = logits + row * row_stride + slot * slot_stride + index
    s = tl.load(place, mask=valid, other=0.0).to(tl.float32)
    if branches > 1:
        i = tl.load(place + branch_stride, mask=valid, other=0.0).to(tl.float32)
        if branches == 2:
            s = (s - i) * scale + i
        else:
            last = place + branch_stride + branch_stride
            u = tl.load(last, mask=valid, other=0.0).to(tl.float32)
            s = (i - u) * second_scale + u + (s - i) * scale
    if has_mask != 0:
        at = mask + row * mask_row_stride + slot * mask_slot_stride + index
        s = tl.where(tl.load(at, mask=valid, other=0) != 0, s, float("-inf"))
    s = tl.div_rn(s, temperature)
    return tl.where(valid, tl.where(s == 0, 0.0, s), float("-inf"))


@triton.jit
def to_key(score):  # type: ignore[no-untyped-def]
    """float32 to int32 in the same order; NaN stands above infinity or below minus infinity."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def row_peak(peaks, entry, n_splits):  # type: ignore[no-untyped-def]
    """The largest score of a row from its splits' `peaks`; NaN if one of them is."""
    lane = tl.arange(0, PART)
    high = tl.full([PART], float("-inf"), tl.float32)
    bad = tl.zeros([PART], tl.int32)
    for first in range(0, n_splits, PART):
        part = first + lane
        at = peaks + entry.to(tl.int64) * n_splits + part
        value = tl.load(at, mask=part < n_splits, other=float("-inf"))
        bad = tl.where(value != value, 1, bad)
        high = tl.where(value > high, value, high)
    return tl.where(tl.max(bad, 0) > 0, float("nan"), tl.max(high, 0))


@triton.jit
def _reached(sums, level, entry, entries, n_splits):  # type: ignore[no-untyped-def]
    """`[WAYS]`: what reaches each key of a level, over all splits."""
    lane, way = tl.arange(0, PART), tl.arange(0, WAYS)
    total = tl.zeros([WAYS], tl.float32)
    base = sums + (tl.cast(level, tl.int64) * entries + entry) * n_splits * WAYS
    for first in range(0, n_splits, PART):
        part = (first + lane)[:, None]
        tile = tl.load(base + part * WAYS + way[None, :], mask=part < n_splits, other=0.0)
        total += tl.sum(tile, 0)
    return total


@triton.jit
def advance(  # type: ignore[no-untyped-def]
    lows, aboves, sums, level, entry, entries, n_splits, wanted, is_share
):
    """Lowest key behind a level, what lies above that key's range, and the target.

    `wanted` is the target, or with `is_share` a share of all mass (the first level's first sum).
    """
    way = tl.arange(0, WAYS)
    target = wanted
    if is_share != 0:
        all_mass = tl.sum(tl.where(way == 0, _reached(sums, 0, entry, entries, n_splits), 0.0), 0)
        target = tl.maximum(all_mass * wanted, 1e-30)
    total = _reached(sums, level, entry, entries, n_splits)
    steps = tl.sum(tl.where((total >= target) & (way > 0), 1, 0), 0)
    at = level * entries + entry
    low = tl.load(lows + at) + (steps << (4 * (LEVELS - 1 - level)))
    within = tl.sum(tl.where(way == steps + 1, total, 0.0), 0)
    above = tl.where(steps == WAYS - 1, tl.load(aboves + at), within)
    return low, above, target


@triton.jit
def level_kernel(  # type: ignore[no-untyped-def]
    logits, mask, peaks, lows, aboves, sums, floors, n_values, n_splits, width, row_stride,
    slot_stride, branch_stride, mask_row_stride, mask_slot_stride, has_mask, branches, scale,
    second_scale, temperature, wanted, is_share, level, has_floor,
):  # fmt: skip
    """One level of a descent: `sums[level, entry, split, way]`, by counts or (`is_share`) masses.

    `floors` `[entries]` int32 are keys below which nothing counts, if `has_floor`.
    """
    entry, split, entries = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    low, above = tl.full([], LOWEST, tl.int32), tl.full([], 0.0, tl.float32)
    if level > 0:
        low, above, _ = advance(
            lows, aboves, sums, level - 1, entry, entries, n_splits, wanted, is_share
        )
    if split == 0:
        tl.store(lows + level * entries + entry, low)
        tl.store(aboves + level * entries + entry, above)
    floor = tl.full([], LOWEST, tl.int32)
    if has_floor != 0:
        floor = tl.load(floors + entry)
    peak = tl.full([], 0.0, tl.float32)
    if is_share != 0:
        found = row_peak(peaks, entry, n_splits)
        peak = tl.where(found == float("-inf"), 0.0, found)
    way = tl.arange(0, WAYS)
    keys = low + (way << (4 * (LEVELS - 1 - level)))
    total = tl.zeros([TILE, WAYS], tl.float32)
    start = split * CHUNK
    for first in range(start, tl.minimum(start + CHUNK, n_values), TILE):
        index = first + tl.arange(0, TILE)
        s = load_scores(
            logits, mask, index, n_values, entry, width, row_stride, slot_stride, branch_stride,
            mask_row_stride, mask_slot_stride, has_mask, branches, scale, second_scale, temperature,
        )  # fmt: skip
        key = to_key(s)
        weight = tl.full([TILE], 1.0, tl.float32)
        if is_share != 0:
            weight = tl.exp(s - peak)
        weight = tl.where((key >= floor) & (index < n_values), weight, 0.0)
        total += tl.where(key[:, None] >= keys[None, :], weight[:, None], 0.0)
    at = sums + ((tl.cast(level, tl.int64) * entries + entry) * n_splits + split) * WAYS
    tl.store(at + way, tl.sum(total, 0))


@triton.jit
def settle_kernel(  # type: ignore[no-untyped-def]
    lows, aboves, sums, floors, last, targets, n_splits, wanted, is_share
):
    """The key a descent ended at, the mass above it and the target, for every entry."""
    entry, entries = tl.program_id(0), tl.num_programs(0)
    low, above, target = advance(
        lows, aboves, sums, LEVELS - 1, entry, entries, n_splits, wanted, is_share
    )
    tl.store(floors + entry, low)
    tl.store(last + entry, above)
    tl.store(targets + entry, target)


@triton.jit
def survey_kernel(  # type: ignore[no-untyped-def]
    logits, mask, peaks, floors, ties, n_values, n_splits, width, row_stride, slot_stride,
    branch_stride, mask_row_stride, mask_slot_stride, has_mask, branches, scale, second_scale,
    temperature, counts,
):  # fmt: skip
    """Every split's largest score (NaN if there is one), or with `counts` its keys at the floor."""
    entry, split = tl.program_id(0), tl.program_id(1)
    high = tl.full([SPAN], float("-inf"), tl.float32)
    tally = tl.zeros([SPAN], tl.int32)
    floor = tl.full([], 0, tl.int32)
    if counts != 0:
        floor = tl.load(floors + entry)
    start = split * CHUNK
    for first in range(start, tl.minimum(start + CHUNK, n_values), SPAN):
        index = first + tl.arange(0, SPAN)
        s = load_scores(
            logits, mask, index, n_values, entry, width, row_stride, slot_stride, branch_stride,
            mask_row_stride, mask_slot_stride, has_mask, branches, scale, second_scale, temperature,
        )  # fmt: skip
        if counts != 0:
            tally += tl.where((to_key(s) == floor) & (index < n_values), 1, 0)
        else:
            tally = tl.where(s != s, 1, tally)
            high = tl.where(s > high, s, high)
    at = entry.to(tl.int64) * n_splits + split
    if counts != 0:
        tl.store(ties + at, tl.sum(tally, 0))
    else:
        bad = tl.max(tally, 0) > 0
        tl.store(peaks + at, tl.where(bad, float("nan"), tl.max(high, 0)))


@triton.jit
def ties_before(ties, entry, split, n_splits):  # type: ignore[no-untyped-def]
    """Keys at the floor in the splits before one."""
    lane = tl.arange(0, PART)
    total = tl.zeros([PART], tl.int32)
    for first in range(0, split, PART):
        part = first + lane
        at = ties + entry.to(tl.int64) * n_splits + part
        total += tl.load(at, mask=part < split, other=0)
    return tl.sum(total, 0)
