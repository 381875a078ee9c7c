"""Exact thresholds over long rows in Triton: radix descent by counting, one program a row.

float32 scores have 32-bit integer keys in the same order. Top-k wants the largest key t that at
least k keys reach; top-p the largest t such that the mass of the keys reaching it is at least its
goal; and of the keys equal to that t, those of the lowest ids survive, as many as are needed: the
same question about ids. A level of a descent sums, for keys in equal steps, the counts or masses
that reach them, moves on to the last step that reached the goal, and refines the steps. It goes
over a row's lists of candidates (`sample_candidates_triton.py`), 11 levels of three bits; or, where
they do not suffice, over the whole row, 8 levels of four bits, each a read of the logits. Nothing
comes back to the host, no atomics are used, and equal inputs give equal bits.

T. Alabi et al., "Fast k-Selection Algorithms for Graphics Processing Units", ACM JEA 17, 2012,
section 3, with sums instead of histograms.

Departures: masses are exp(score - peak) without normalisation, in float32 and in an order of
additions of their own, so that a boundary of top-p within rounding of p may fall a token apart from
the specification's.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = tl.constexpr(4096)  # tokens a program reads
ROOM = tl.constexpr(1024)  # candidates a program may leave
DEPTH = tl.constexpr(128)  # candidates of a list at a time
LIST_TILE = tl.constexpr(2048)  # over 16 lists
ROW_TILE = tl.constexpr(512)  # tokens at a time where a whole row is searched
PART = tl.constexpr(64)  # splits merged at a time
LOWEST = tl.constexpr(-(2**31))
HIGHEST = tl.constexpr(2**31 - 1)
LISTED = tl.constexpr(1)  # states of a row: its candidates hold what stays,
BRACKETED = tl.constexpr(2)  # a threshold is known to lie among its candidates,
SEARCHED = tl.constexpr(3)  # or the whole row is gone through


@triton.jit
def load_scores(  # type: ignore[no-untyped-def]
    logits, mask, index, n_values, entry, width, row_stride, slot_stride, branch_stride,
    mask_row_stride, mask_slot_stride, has_mask, branches, scale, second_scale, temperature,
):  # fmt: skip
    """Scores after guidance, mask and temperature; -inf after the row's end and no -0."""
    row = (entry // width).to(tl.int64)
    slot = (entry % width).to(tl.int64)
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
def to_score(key):  # type: ignore[no-untyped-def]
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def stays(key, index, bounds, entry, entries):  # type: ignore[no-untyped-def]
    """Whether tokens survive: above a row's threshold, or at it and not after the last id there."""
    floor, last = tl.load(bounds + 2 * entries + entry), tl.load(bounds + 3 * entries + entry)
    return (key > floor) | ((key == floor) & (index <= last))


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
def longest(counts, entry, n_splits):  # type: ignore[no-untyped-def]
    """The largest number of candidates in a split of a row; above ROOM some are lost."""
    lane = tl.arange(0, PART)
    most = tl.zeros([PART], tl.int32)
    for first in range(0, n_splits, PART):
        part = first + lane
        at = counts + entry.to(tl.int64) * n_splits + part
        most = tl.maximum(most, tl.load(at, mask=part < n_splits, other=0))
    return tl.max(most, 0)


@triton.jit
def search_kernel(  # type: ignore[no-untyped-def]
    logits, mask, lists, counts, tops, bounds, goals, n_values, n_splits, width, row_stride,
    slot_stride, branch_stride, mask_row_stride, mask_slot_stride, has_mask, branches, scale,
    second_scale, temperature, top_k, top_p, id_bits, WHOLE: tl.constexpr,
):  # fmt: skip
    """What stays of a row: `bounds[2]` its lowest key, `bounds[3]` the last id that has that key.

    Over the lists of a row if its state `bounds[0]` says so; a row whose lists ran over becomes
    SEARCHED. Over the whole row, with `WHOLE`, if it is SEARCHED. `top_k` or `top_p` is 0 where it
    is not wanted; ids have `id_bits`.
    """
    BITS: tl.constexpr = 4 if WHOLE else 3
    WAYS: tl.constexpr = 16 if WHOLE else 8
    TILE: tl.constexpr = ROW_TILE if WHOLE else LIST_TILE
    entry = tl.program_id(0)
    entries = tl.num_programs(0)
    state = tl.load(bounds + entry)
    floor = tl.full([], LOWEST, tl.int32)
    depth = 1
    if WHOLE:
        wanted = state == SEARCHED
        n_tiles = tl.cdiv(n_values, TILE)
    else:
        most = longest(counts, entry, n_splits)
        wanted = (state != SEARCHED) & (most <= ROOM)
        floor = tl.load(bounds + entries + entry)
        depth = tl.cdiv(most, DEPTH)
        n_tiles = tl.cdiv(n_splits, TILE // DEPTH) * depth
        if most > ROOM:
            tl.store(bounds + entry, SEARCHED)
    if wanted:
        lane = tl.arange(0, TILE)
        way = tl.arange(0, WAYS).to(tl.uint32)
        base = entry.to(tl.int64) * n_splits
        peak = tl.load(tops + entry)
        peak = tl.where(peak == float("-inf"), 0.0, peak)
        nothing = tl.zeros([TILE, WAYS], tl.float32)
        goal = tl.load(goals + entry)
        if WHOLE:
            goal = top_k
        last = tl.full([], HIGHEST, tl.int32)
        for question in range(0, 3):  # the floor of top-k, of top-p, the last id at that
            if tl.where(question == 0, top_k, top_p) != 0:
                low = tl.full([], LOWEST, tl.int32)
                shift = 32
                if question == 2:
                    low = -(tl.full([], 1, tl.int32) << id_bits)
                    shift = id_bits
                above = tl.full([], 0.0, tl.float32)
                is_share = (question == 1) & (WHOLE | (top_k != 0))
                while shift > 0:
                    shift = tl.maximum(shift - BITS, 0)
                    total = nothing
                    for tile in range(0, n_tiles):
                        if WHOLE:
                            index = tile * TILE + lane
                            counted = index < n_values
                            s = load_scores(
                                logits, mask, index, n_values, entry, width, row_stride,
                                slot_stride, branch_stride, mask_row_stride, mask_slot_stride,
                                has_mask, branches, scale, second_scale, temperature,
                            )  # fmt: skip
                            key = to_key(s)
                        else:
                            split = tile // depth * (TILE // DEPTH) + lane // DEPTH
                            place = tile % depth * DEPTH + lane % DEPTH
                            held = tl.load(counts + base + split, mask=split < n_splits, other=0)
                            counted = place < held
                            at = lists + 2 * ((base + split) * ROOM + place)
                            key = tl.load(at, mask=counted, other=LOWEST)
                            index = tl.load(at + 1, mask=counted & (question == 2), other=0)
                        counted &= (key >= floor) & ((question < 2) | (key == floor))
                        weight = tl.where(counted, 1.0, 0.0)
                        if question == 1:
                            weight = tl.where(counted, tl.exp(to_score(key) - peak), 0.0)
                        x = tl.where(question == 2, ~index, key)
                        weight = tl.where(x >= low, weight, 0.0)
                        step = (x - low).to(tl.uint32, bitcast=True) >> shift.to(tl.uint32)
                        total += tl.where(step[:, None] >= way[None, :], weight[:, None], 0.0)
                    reached = tl.sum(total, 0)
                    if is_share & (shift == 32 - BITS):  # the first sum is of all that top-k keeps
                        goal = tl.maximum(tl.max(reached, 0) * top_p, 1e-30)
                    suffices = (reached >= goal) & (way > 0)
                    low += tl.sum(suffices.to(tl.int32), 0) << shift
                    above = tl.max(tl.where((reached < goal) & (way > 0), reached, above), 0)
                if question == 2:
                    last = ~low
                else:
                    floor = tl.maximum(floor, low)
                    ties = tl.ceil(tl.div_rn(goal - above, tl.exp(to_score(floor) - peak)))
                    goal = tl.where(low == LOWEST, float("inf"), ties)
        tl.store(bounds + 2 * entries + entry, floor)
        tl.store(bounds + 3 * entries + entry, last)
