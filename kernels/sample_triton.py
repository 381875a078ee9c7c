"""Raw logits to tokens with frozen noise in Triton, several programs a row.

Programs of 4096 tokens each combine the branches, filter, add the slot's Philox noise in registers
and keep their best token, their largest score and their sum of exponentials; one program a row
merges them. Where something is cut off by rank or mass, one read finds candidates first
(`sample_candidates_triton.py`), and noise is computed for the survivors alone; the device decides
which way a row goes, and every launch of the other ways returns at once.

Reads of the logits, in addition to 512 tokens of a row: 1 without truncation, and 2 with min-p
alone. With top-k or top-p:

- 1 where all survivors are among the candidates: top-p up to some 3 % of the tokens, top-k up to
  3.7 % of them, 12.8 % with top-p too.
- 2 elsewhere, with those between two of 16 edges as candidates.
- 11 with top-k, 11 and a read for every four bits of an id with top-p, where more than a quarter of
  a program's tokens lie between two edges, as in rows of equal logits, or a score is no number. 18
  and those for the ids with both, there and wherever candidates do not hold all survivors.

Departures: those of the thresholds; logarithms and exponentials may differ in their last bits, so
that near-ties may fall otherwise; temperature divides, where torch multiplies by the reciprocal on
GPUs. Where `peak` is not finite, tokens may differ.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.kernels.build import Build
from mmaccel.kernels.noise_triton import interleave, to_gumbel, to_uniform, words
from mmaccel.kernels.sample import Sampled, Settings
from mmaccel.kernels.sample_candidates_triton import (
    allocate,
    first_rank,
    gather_kernel,
    glance_kernel,
    judge_kernel,
    write_list,
)
from mmaccel.kernels.sample_parts_triton import NOBODY, finish_kernel, merge_kernel, store_part
from mmaccel.kernels.sample_threshold_triton import (
    BRACKETED,
    CHUNK,
    SEARCHED,
    load_scores,
    row_peak,
    search_kernel,
    stays,
    to_key,
)
from mmaccel.kernels.takes import COMMON, Takes

BLOCK = tl.constexpr(512)  # tokens at a time
WARPS = 4
PLAIN: dict[str, Any] = {"num_warps": WARPS, "enable_fp_fusion": False}  # guidance rounds as torch
WIDE: dict[str, Any] = {**PLAIN, "num_warps": 2 * WARPS}


TAKES = {"logits": Takes(COMMON)}


@triton.jit
def _sample_kernel(  # type: ignore[no-untyped-def]
    logits, mask, peaks, bounds, lists, counts, seeds, items, slots, purpose,
    parts, part_token, last, n_values, n_splits, width, row_stride, slot_stride, branch_stride,
    mask_row_stride, mask_slot_stride, has_mask, branches, scale, second_scale, temperature,
    has_noise, has_min, log_min_p, STATE: tl.constexpr,
):  # fmt: skip
    """Every split's best perturbed score and token, largest score and sum of exponentials.

    Of all rows and all tokens if `STATE` is 0; else, of rows in that state, of tokens that stay,
    where `peaks` are those of rows and not of splits. Of BRACKETED rows, those below the floor that
    may stay are listed; other rows' parts are emptied.
    """
    entry = tl.program_id(0)
    split = tl.program_id(1)
    entries = tl.num_programs(0)
    row = entry // width
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.full([BLOCK], NOBODY, tl.int32)
    high = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    bad = tl.zeros([BLOCK], tl.int32)
    used = 0
    start = split * CHUNK
    end = tl.minimum(start + CHUNK, n_values)
    if STATE != 0:
        end = tl.where(tl.load(bounds + entry) == STATE, end, start)
    least = tl.full([], float("-inf"), tl.float32)
    if has_min != 0:
        if STATE == 0:
            least = row_peak(peaks, entry, n_splits) + log_min_p
        else:
            least = tl.load(peaks + entry) + log_min_p
    list_at = entry.to(tl.int64) * n_splits + split
    for first in range(start, end, BLOCK):
        index = first + lane
        s = load_scores(
            logits, mask, index, n_values, entry, width, row_stride, slot_stride, branch_stride,
            mask_row_stride, mask_slot_stride, has_mask, branches, scale, second_scale, temperature,
        )  # fmt: skip
        if last is not None:
            n_copied = tl.where(entry % width == width - 1, n_values, 0)
            copied = last + row.to(tl.int64) * n_values + index
            tl.store(copied, s, mask=index < n_copied)
        bad = tl.where(s != s, 1, bad)
        if STATE != 0:
            key = to_key(s)
            if STATE == SEARCHED:
                kept = stays(key, index, bounds, entry, entries)
            else:
                kept = key >= tl.load(bounds + 2 * entries + entry)
                listed = ((key >= tl.load(bounds + entries + entry)) & (kept == 0)).to(tl.int32)
                place = used + tl.cumsum(listed, 0) - listed
                write_list(lists, list_at, place, key, index, listed)
                used += tl.sum(listed, 0)
            s = tl.where(kept, s, float("-inf"))
        s = tl.where(s < least, float("-inf"), s)
        higher = tl.where(s > high, s, high)
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(high - finite) + tl.exp(s - finite)
        high = higher
        value = s
        if STATE != 0 or has_noise != 0:
            blocks = first // 4 + tl.arange(0, BLOCK // 4)
            a, b, c, d = words(
                tl.load(seeds + row),
                tl.load(slots + entry),
                tl.load(items + row),
                tl.load(purpose),
                blocks,
            )
            noise = interleave(to_uniform(a), to_uniform(b), to_uniform(c), to_uniform(d))
            value = s + to_gumbel(noise)
        token = tl.where(value > best, index, token)
        best = tl.where(value > best, value, best)
    if (STATE == BRACKETED) & (end > start):
        tl.store(counts + list_at, used)
    if (STATE != SEARCHED) | (end > start):
        any_bad = tl.max(bad, 0) > 0
        n_parts = n_splits if STATE == 0 else 2 * n_splits
        store_part(parts, part_token, n_parts, split, best, token, high, total, any_bad)


def sample_frozen(
    logits: Tensor,
    branches: int,
    settings: Settings,
    mask: Tensor | None,
    seeds: Tensor,
    items: Tensor,
    slots: Tensor,
    purpose: Tensor,
    forced: Tensor | None = None,
    last: Tensor | None = None,
) -> Sampled:
    """Cost: 2 launches, 3 with min-p alone, 9 with top-k or top-p; 2048 scratch numbers a 4096
    tokens.
    """
    batch = logits.shape[0] // branches
    width = logits.shape[1]
    n_values = logits.shape[2]
    entries = batch * width
    n_splits = triton.cdiv(n_values, CHUNK.value)
    device = logits.device
    real = torch.float32
    results = (
        torch.empty(batch, width, dtype=torch.int64, device=device),
        torch.empty(batch, width, dtype=real, device=device),
        torch.empty(batch, width, dtype=real, device=device),
    )
    if not entries:
        return Sampled(*results)
    grid = (entries, n_splits)
    greedy = settings.temperature == 0
    allowed = logits if mask is None else mask.expand(batch, width, -1).view(torch.uint8)
    if mask is not None and allowed.stride(-1) != 1:
        allowed = allowed.contiguous()
    common = (
        n_values,
        n_splits,
        width,
        logits.stride(0),
        logits.stride(1),
        batch * logits.stride(0),
        allowed.stride(0),
        allowed.stride(1),
        int(mask is not None),
        branches,
        float(settings.scale),
        float(settings.second_scale),
        1.0 if greedy else float(settings.temperature),
    )
    top_k = settings.top_k or 0
    top_p = settings.top_p or 0.0
    top_k = 0 if greedy or top_k >= n_values else top_k
    top_p = 0.0 if greedy or top_p >= 1 else top_p
    min_p = 0.0 if greedy else settings.min_p or 0.0
    read = (logits, allowed)
    drawn = (seeds.contiguous(), items.contiguous(), slots.contiguous(), purpose)
    floor = (int(bool(min_p)), math.log(min_p or 1.0))
    cuts = bool(top_k or top_p)
    n_parts = n_splits * (2 if cuts else 1)
    parts = torch.empty(3, entries, n_parts, dtype=real, device=device)
    part_token = torch.empty(entries, n_parts, dtype=torch.int32, device=device)
    to = (parts, part_token)
    scratch = allocate(entries if cuts else 0, n_splits, device)
    peaks = scratch.peaks
    lists = (scratch.lists, scratch.counts)
    sums = (scratch.edges, scratch.sums)
    wanted = (float(top_k), float(top_p))
    ends = (scratch.bounds, scratch.goals)
    if min_p and not cuts:
        peaks = torch.empty(entries, n_splits, dtype=real, device=device)
        gather_kernel[grid](*read, peaks, *lists, *sums, *common, 0, 0, **WIDE)
    if cuts:
        rank = first_rank(n_values, top_k, bool(top_p))
        glance_kernel[(entries,)](*read, scratch.edges, *common, rank, **WIDE)
        gather_kernel[grid](*read, peaks, *lists, *sums, *common, int(not top_k), 1, **WIDE)
        judge_kernel[(entries,)](
            scratch.counts, peaks, *sums, *ends, scratch.tops, n_splits, *wanted
        )

    def sample(state: int) -> None:
        _sample_kernel[grid](
            *read,
            scratch.tops if state else peaks,
            scratch.bounds,
            *lists,
            *drawn,
            *to,
            None if state else last,
            *common,
            int(not greedy),
            *floor,
            STATE=state,
            **(WIDE if state == BRACKETED.value else PLAIN),
        )

    if cuts:
        id_bits = 4 * triton.cdiv((n_values - 1).bit_length(), 4)
        search = (*read, *lists, scratch.tops, *ends, *common, *wanted, id_bits)
        sample(BRACKETED.value)
        search_kernel[(entries,)](*search, WHOLE=False, **WIDE)
        search_kernel[(entries,)](*search, WHOLE=True, **{**PLAIN, "num_warps": 4 * WARPS})
        sample(SEARCHED.value)
        finish_kernel[grid](
            *lists, scratch.tops, scratch.bounds, *drawn, *to, n_splits, width, *floor, **PLAIN
        )
    else:
        sample(0)
    known = slots if forced is None else forced.contiguous()
    merge_kernel[(entries,)](*to, known, *results, n_parts, int(greedy), int(forced is not None))
    return Sampled(*results)


_TYPES = {
    **dict.fromkeys(("lists", "counts", "edges", "bounds", "part_token"), "*i32"),
    **dict.fromkeys(("seeds", "items", "slots", "purpose", "forced", "tokens"), "*i64"),
    **dict.fromkeys(("row_stride", "branch_stride"), "i64"),
    **dict.fromkeys(("n_values", "n_splits", "n_parts", "width", "slot_stride"), "i32"),
    **dict.fromkeys(("mask_row_stride", "mask_slot_stride", "has_mask", "branches"), "i32"),
    **dict.fromkeys(("scale", "second_scale", "temperature"), "fp32"),
    **dict.fromkeys(("rank", "top_k", "top_p", "log_min_p"), "fp32"),
    **dict.fromkeys(("is_share", "has_lists", "has_noise", "has_min"), "i32"),
    **dict.fromkeys(("id_bits", "is_greedy", "has_forced"), "i32"),
    "mask": "*u8",
}


def _build(
    kernel: Any,
    registers: int,
    dtype: str = "bf16",
    many: int = 1,
    fp_fusion: bool = False,
    **fixed: int | None,
) -> Build:
    kinds = _TYPES | {"logits": f"*{dtype}"}
    return Build.of(
        kernel, kinds, fixed, many * WARPS, 3, registers, other="*fp32", fp_fusion=fp_fusion
    )


def builds() -> list[Build]:
    """Half precision is read like bfloat16."""
    return [
        *(_build(_sample_kernel, 128, dtype, STATE=0) for dtype in ("bf16", "fp32")),
        _build(_sample_kernel, 128, last=None, STATE=0),
        _build(_sample_kernel, 128, many=2, last=None, STATE=BRACKETED.value),
        _build(_sample_kernel, 128, last=None, STATE=SEARCHED.value),
        *(_build(gather_kernel, 128, dtype, many=2) for dtype in ("bf16", "fp32")),
        _build(glance_kernel, 208, many=2),
        _build(judge_kernel, 96, fp_fusion=True),
        _build(search_kernel, 192, many=2, WHOLE=False),
        _build(search_kernel, 128, many=4, WHOLE=True),
        _build(finish_kernel, 96),
        _build(merge_kernel, 64, fp_fusion=True),
    ]
