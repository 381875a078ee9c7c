"""Parts of a row in Triton: the surviving candidates, and the best of all parts.

A part is a program's best perturbed score and its token, largest score, and sum of exponentials
below that. Parts of candidates, which alone have noise, follow those of `sample_triton.py`; one
program a row merges them in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mmaccel.kernels.noise_triton import to_gumbel, to_uniform, words
from mmaccel.kernels.sample_threshold_triton import (
    LOWEST,
    PART,
    ROOM,
    SEARCHED,
    row_peak,
    stays,
    to_score,
)

BLOCK = tl.constexpr(512)  # candidates at a time
NOBODY = tl.constexpr(2**31 - 1)  # no token


@triton.jit
def store_part(  # type: ignore[no-untyped-def]
    parts, part_token, n_parts, part, best, token, high, total, bad
):
    """The part of lanes' `best`, lowest `token`, `high` and `total`; `high` is NaN if `bad`."""
    entry = tl.program_id(0)
    at = entry.to(tl.int64) * n_parts + part
    step = tl.num_programs(0).to(tl.int64) * n_parts
    winner = tl.max(best, 0)
    tl.store(parts + at, winner)
    tl.store(part_token + at, tl.min(tl.where(best == winner, token, NOBODY), 0))
    peak = tl.max(high, 0)
    finite = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(parts + step + at, tl.where(bad, float("nan"), peak))
    tl.store(parts + 2 * step + at, tl.sum(total * tl.exp(high - finite), 0))


@triton.jit
def finish_kernel(  # type: ignore[no-untyped-def]
    lists,
    counts,
    tops,
    bounds,
    seeds,
    items,
    slots,
    purpose,
    parts,
    part_token,
    n_splits,
    width,
    has_min,
    log_min_p,
):
    """The parts of the candidates, after those of the tokens that `sample_triton.py` samples."""
    entry = tl.program_id(0)
    split = tl.program_id(1)
    entries = tl.num_programs(0)
    row = entry // width
    from_list = entry.to(tl.int64) * n_splits + split
    count = tl.load(counts + from_list)
    count = tl.where(tl.load(bounds + entry) == SEARCHED, 0, count)
    least = tl.full([], float("-inf"), tl.float32)
    if has_min != 0:
        least = tl.load(tops + entry) + log_min_p
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.full([BLOCK], NOBODY, tl.int32)
    high = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, count, BLOCK):
        place = first + tl.arange(0, BLOCK)
        held = place < count
        at = lists + from_list * ROOM * 2 + place * 2
        key = tl.load(at, mask=held, other=LOWEST)
        index = tl.load(at + 1, mask=held, other=0)
        kept = held & stays(key, index, bounds, entry, entries)
        s = tl.where(kept, to_score(key), float("-inf"))
        s = tl.where(s < least, float("-inf"), s)
        higher = tl.maximum(high, s)
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(high - finite) + tl.exp(s - finite)
        high = higher
        a, b, c, d = words(
            tl.load(seeds + row),
            tl.load(slots + entry),
            tl.load(items + row),
            tl.load(purpose),
            index // 4,
        )
        nearer, farther = tl.where(index % 2 == 0, a, b), tl.where(index % 2 == 0, c, d)
        value = s + to_gumbel(to_uniform(tl.where(index % 4 < 2, nearer, farther)))
        first_one = (value == best) & (index < token)
        token = tl.where((value > best) | first_one, index, token)
        best = tl.maximum(best, value)
    store_part(parts, part_token, 2 * n_splits, n_splits + split, best, token, high, total, False)


@triton.jit
def merge_kernel(  # type: ignore[no-untyped-def]
    parts, part_token, forced, tokens, peaks, lses, n_splits, is_greedy, has_forced
):
    """The best of all splits, lowest id first, with the row's peak and logsumexp."""
    entry = tl.program_id(0)
    lane = tl.arange(0, PART)
    best = tl.full([PART], float("-inf"), tl.float32)
    token = tl.full([PART], NOBODY, tl.int32)
    total = tl.zeros([PART], tl.float32)
    step = tl.num_programs(0).to(tl.int64) * n_splits
    peak = row_peak(parts + step, entry, n_splits)
    finite = tl.where(peak == float("-inf"), 0.0, peak)
    for first in range(0, n_splits, PART):
        part = first + lane
        at = entry.to(tl.int64) * n_splits + part
        held = part < n_splits
        value = tl.load(parts + at, mask=held, other=float("-inf"))
        token = tl.where(value > best, tl.load(part_token + at, mask=held, other=NOBODY), token)
        best = tl.where(value > best, value, best)
        high = tl.load(parts + step + at, mask=held, other=float("-inf"))
        total += tl.load(parts + 2 * step + at, mask=held, other=0.0) * tl.exp(high - finite)
    winner = tl.max(best, 0)
    found = tl.min(tl.where(best == winner, token, NOBODY), 0).to(tl.int64)
    found = tl.where(found == NOBODY, 0, found)
    lse = tl.where(tl.abs(peak) == float("inf"), peak, peak + tl.log(tl.sum(total, 0)))
    if is_greedy != 0:  # certain, or invalid logits
        peak = peak - peak
        lse = peak
    if has_forced != 0:
        known = tl.load(forced + entry)
        found = tl.where(known >= 0, known, found)
        peak = tl.where(known >= 0, 0.0, peak)
        lse = tl.where(known >= 0, 0.0, lse)
    tl.store(tokens + entry, found)
    tl.store(peaks + entry, peak)
    tl.store(lses + entry, lse)
