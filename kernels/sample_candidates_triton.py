"""Candidates for exact top-k and top-p in Triton: one read of the logits, several programs a row.

Mostly only a small part of a long row survives truncation. A glance at 512 tokens spread over the
row gives 16 keys, its edges: one that somewhat more tokens should reach than may survive, and the
others in equal steps through the row. Then every token is read once: each program holds 4096 in
registers, writes those that reach the first edge to a list of its own, and sums what reaches each
edge, by counts for top-k and by masses for top-p. One program a row decides: where the first edge
was low enough and no list ran over, all survivors are in the lists (LISTED). Otherwise the sums say
between which two edges the threshold lies: a second read samples what is above and lists what is
between (BRACKETED). Where that runs over too, or where top-k and top-p are both set and lists do
not suffice, whole rows are searched (SEARCHED).

The glance affects speed alone; that lists hold all survivors follows from sums over all tokens.
Tokens go to programs in turns of 128, so that a run of likely ids does not fill a single list. The
sample that bounds a selection: R. Floyd, R. Rivest, Communications of the ACM 18(3), 1975.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.kernels.sample_threshold_triton import (
    BRACKETED,
    CHUNK,
    HIGHEST,
    LISTED,
    PART,
    ROOM,
    SEARCHED,
    load_scores,
    longest,
    row_peak,
    to_key,
)

GLANCE = tl.constexpr(512)  # tokens of a glance
RUN = tl.constexpr(16)  # of them side by side
STEP = tl.constexpr(32)  # of them compared with all at a time
EDGES = tl.constexpr(16)
TURN = tl.constexpr(128)  # tokens side by side in a program
LEAST = tl.constexpr(-0x7F800000)  # lowest key above that of -inf


class Candidates(NamedTuple):
    lists: Tensor  # [entries, splits, ROOM, 2] int32, keys and ids
    counts: Tensor  # [entries, splits] int32, above ROOM where the list ran over
    peaks: Tensor  # [entries, splits] float32
    edges: Tensor  # [entries, EDGES] int32
    sums: Tensor  # [entries, splits, EDGES] float32, what reaches each edge
    bounds: Tensor  # [4, entries] int32: state, lowest key listed, lowest that stays, its last id
    goals: Tensor  # [entries] float32, what the lists' keys shall reach
    tops: Tensor  # [entries] float32, the largest score


def allocate(entries: int, n_splits: int, device: torch.device) -> Candidates:
    def make(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    split = (entries, n_splits)
    real = torch.float32
    return Candidates(
        make(*split, ROOM.value, 2), make(*split), make(*split, dtype=real),
        make(entries, EDGES.value), make(*split, EDGES.value, dtype=real), make(4, entries),
        make(entries, dtype=real), make(entries, dtype=real),
    )  # fmt: skip


def first_rank(n_values: int, top_k: int, has_p: bool) -> float:
    """Rank in the glance of the first edge: 1/32 of the row for top-p; for top-k four standard
    deviations after that of k. -1, no candidates, where a second read is cheaper than lists; with
    top-p too, where they would run over.
    """
    if not top_k:
        return GLANCE.value / 32
    rank = top_k * min(GLANCE.value / n_values, 1.0)
    rank += 4 * rank**0.5 + 4
    return rank if rank <= GLANCE.value * (0.2 if has_p else 0.08) else -1.0


@triton.jit
def glance_kernel(  # type: ignore[no-untyped-def]
    logits, mask, edges, n_values, n_splits, width, row_stride, slot_stride, branch_stride,
    mask_row_stride, mask_slot_stride, has_mask, branches, scale, second_scale, temperature, rank,
):  # fmt: skip
    """`edges` of a row: the key of `rank` in a glance, 14 in equal steps, the lowest finite one."""
    entry = tl.program_id(0)
    lane = tl.arange(0, GLANCE)
    index = lane // RUN * tl.maximum(n_values // (GLANCE // RUN), RUN) + lane % RUN
    s = load_scores(
        logits, mask, index, n_values, entry, width, row_stride, slot_stride, branch_stride,
        mask_row_stride, mask_slot_stride, has_mask, branches, scale, second_scale, temperature,
    )  # fmt: skip
    key = to_key(s)
    table = tl.reshape(key, [GLANCE // STEP, STEP])
    line = tl.arange(0, GLANCE // STEP)[:, None]
    before = tl.zeros([GLANCE], tl.int32)
    for step in range(0, GLANCE // STEP):
        other = tl.sum(tl.where(line == step, table, 0), 0)
        before += tl.sum((other[None, :] > key[:, None]).to(tl.int32), 1)
    found = tl.sum((key >= LEAST).to(tl.int32), 0).to(tl.float32)
    way = tl.arange(0, EDGES)
    wanted = tl.where(way == 0, rank, found * way / (EDGES - 1))
    behind = before.to(tl.float32)[:, None] >= wanted[None, :]
    edge = tl.max(tl.where(behind, tl.maximum(key, LEAST)[:, None], LEAST), 0)
    edge = tl.where(way == EDGES - 1, LEAST, edge)
    edge = tl.where(wanted < 0, HIGHEST, edge)
    tl.store(edges + entry * EDGES + way, edge)


@triton.jit
def gather_kernel(  # type: ignore[no-untyped-def]
    logits, mask, peaks, lists, counts, edges, sums, n_values, n_splits, width, row_stride,
    slot_stride, branch_stride, mask_row_stride, mask_slot_stride, has_mask, branches, scale,
    second_scale, temperature, is_share, has_lists,
):  # fmt: skip
    """Each split's largest score (NaN if there is one); if `has_lists` its candidates and what
    reaches each edge: counts, or (`is_share`) masses relative to its largest score's.
    """
    entry, split = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, CHUNK)
    index = (lane // TURN * n_splits + split) * TURN + lane % TURN
    s = load_scores(
        logits, mask, index, n_values, entry, width, row_stride, slot_stride, branch_stride,
        mask_row_stride, mask_slot_stride, has_mask, branches, scale, second_scale, temperature,
    )  # fmt: skip
    at = entry.to(tl.int64) * n_splits + split
    bad = tl.max((s != s).to(tl.int32), 0) > 0
    high = tl.max(tl.where(s != s, float("-inf"), s), 0)
    tl.store(peaks + at, tl.where(bad, float("nan"), high))
    if has_lists != 0:
        key = to_key(s)
        weight = tl.where(key >= LEAST, 1.0, 0.0)
        if is_share != 0:
            weight = tl.exp(s - tl.where(high == float("-inf"), 0.0, high))
        for way in range(0, EDGES):
            edge = tl.load(edges + entry * EDGES + way)
            tl.store(sums + at * EDGES + way, tl.sum(tl.where(key >= edge, weight, 0.0), 0))
        # lists come last: beside their addresses, keys alone are held in registers
        listed = (key >= tl.load(edges + entry * EDGES)).to(tl.int32)
        place = tl.cumsum(listed, 0) - listed
        write_list(lists, at, place, key, index, listed)
        tl.store(counts + at, tl.sum(listed, 0))


@triton.jit
def write_list(lists, at, place, key, index, listed):  # type: ignore[no-untyped-def]
    """Append tokens that are `listed` to list `at`, up to its capacity."""
    fits = (listed != 0) & (place < ROOM)
    to = lists + at * ROOM * 2 + place * 2
    tl.store(to, key, mask=fits)
    tl.store(to + 1, index, mask=fits)


@triton.jit
def judge_kernel(  # type: ignore[no-untyped-def]
    counts, peaks, edges, sums, bounds, goals, tops, n_splits, top_k, top_p
):
    """What becomes of a row: its state, the lists' lowest key and goal, and for a second read the
    key from which on everything stays.
    """
    entry = tl.program_id(0)
    entries = tl.num_programs(0)
    way, lane = tl.arange(0, EDGES), tl.arange(0, PART)
    peak = row_peak(peaks, entry, n_splits)
    finite = tl.where(peak == float("-inf"), 0.0, peak)
    reached = tl.zeros([EDGES], tl.float32)
    for first in range(0, n_splits, PART):
        part = first + lane
        held = part < n_splits
        at = entry.to(tl.int64) * n_splits + part
        high = tl.load(peaks + at, mask=held, other=float("-inf"))
        weight = tl.where(top_k != 0, 1.0, tl.exp(high - finite))
        tile = tl.load(sums + at[:, None] * EDGES + way[None, :], mask=held[:, None], other=0.0)
        reached += tl.sum(tile * weight[:, None], 0)
    edge = tl.load(edges + entry * EDGES + way)
    every = tl.sum(tl.where(way == EDGES - 1, reached, 0.0), 0)
    goal = tl.where(top_k != 0, top_k, tl.maximum(every * top_p, 1e-30))
    suffices = (way == 0) & ((reached >= goal) | (edge == LEAST))
    fits = longest(counts, entry, n_splits) <= ROOM
    is_listed = (tl.max(suffices.to(tl.int32), 0) != 0) & fits
    low = tl.load(edges + entry * EDGES)
    upper = tl.full([], HIGHEST, tl.int32)
    under = tl.full([], 0.0, tl.float32)
    state = tl.full([], LISTED, tl.int32)
    if is_listed == 0:
        low = tl.max(tl.where(reached >= goal, edge, LEAST), 0)
        upper = tl.min(tl.where(reached >= goal, HIGHEST, edge), 0)
        under = tl.max(tl.where(reached >= goal, 0.0, reached), 0)
        state = tl.where((top_k != 0) & (top_p != 0), SEARCHED, BRACKETED)
    lawful = (peak == peak) & (peak < float("inf"))
    tl.store(bounds + entry, tl.where(lawful, state, SEARCHED))
    tl.store(bounds + entries + entry, low)
    tl.store(bounds + 2 * entries + entry, upper)
    tl.store(bounds + 3 * entries + entry, HIGHEST)
    tl.store(goals + entry, goal - under)
    tl.store(tops + entry, peak)
