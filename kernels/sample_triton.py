"""Raw logits to tokens with frozen noise in Triton, several programs a row.

Idea: programs of 4096 tokens each combine the branches, filter, add the slot's Philox noise in
registers and keep their best token, their largest score and their sum of exponentials; one program
a row merges them. Where something is cut off, thresholds come first: see
`sample_threshold_triton.py`. At a boundary of top-p tied scores are counted, and the lowest ids
stay, as in the specification.

Reads of the logits (all branches once each): 1 without truncation; 2 with min-p; 9 with top-k;
11 with top-p; 19 with both. A window's logits stay in the second-level cache between the reads.

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
from mmaccel.kernels.sample_threshold_triton import (
    CHUNK,
    LEVELS,
    PART,
    allocate,
    level_kernel,
    load_scores,
    row_peak,
    settle_kernel,
    survey_kernel,
    ties_before,
    to_key,
)

BLOCK = tl.constexpr(512)  # tokens at a time
NOBODY = tl.constexpr(2**31 - 1)  # no token
WARPS = 4
PLAIN: dict[str, Any] = {"num_warps": WARPS, "enable_fp_fusion": False}  # guidance rounds as torch


@triton.jit
def _sample_kernel(  # type: ignore[no-untyped-def]
    logits, mask, peaks, ties, floors, last, seeds, items, slots, purpose, parts, part_token,
    n_values, n_splits, width, row_stride, slot_stride, branch_stride, mask_row_stride,
    mask_slot_stride, has_mask, branches, scale, second_scale, temperature, has_noise, has_k, has_p,
    has_min, log_min_p,
):  # fmt: skip
    """Every split's best perturbed score and token, largest score and sum of exponentials."""
    entry, split, entries = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    row = entry // width
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.full([BLOCK], NOBODY, tl.int32)
    high = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    bad = tl.zeros([BLOCK], tl.int32)
    before, tied_at, above, target, weight = 0, 0, 0.0, 0.0, 0.0
    if has_p != 0:
        before = ties_before(ties, entry, split, n_splits)
        tied_at = tl.load(floors + entries + entry)
        above = tl.load(last + entry)
        target = tl.load(last + entries + entry)
        bits = tl.where(tied_at < 0, tied_at ^ 0x7FFFFFFF, tied_at)
        weight = tl.exp(bits.to(tl.float32, bitcast=True) - row_peak(peaks, entry, n_splits))
    least = tl.full([], float("-inf"), tl.float32)
    if has_min != 0:
        least = row_peak(peaks, entry, n_splits) + log_min_p
    start = split * CHUNK
    for first in range(start, tl.minimum(start + CHUNK, n_values), BLOCK):
        index = first + lane
        s = load_scores(
            logits, mask, index, n_values, entry, width, row_stride, slot_stride, branch_stride,
            mask_row_stride, mask_slot_stride, has_mask, branches, scale, second_scale, temperature,
        )  # fmt: skip
        bad = tl.where(s != s, 1, bad)
        key = to_key(s)
        if has_k != 0:
            s = tl.where(key >= tl.load(floors + entry), s, float("-inf"))
        if has_p != 0:
            tied = ((key == tied_at) & (index < n_values)).to(tl.int32)
            rank = before + tl.cumsum(tied, 0) - tied
            stays = (tied != 0) & (above + rank.to(tl.float32) * weight < target)
            before += tl.sum(tied, 0)
            s = tl.where((key > tied_at) | stays, s, float("-inf"))
        s = tl.where(s < least, float("-inf"), s)
        higher = tl.where(s > high, s, high)
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(high - finite) + tl.exp(s - finite)
        high = higher
        value = s
        if has_noise != 0:
            blocks = first // 4 + tl.arange(0, BLOCK // 4)
            a, b, c, d = words(
                tl.load(seeds + row), tl.load(slots + entry), tl.load(items + row),
                tl.load(purpose), blocks,
            )  # fmt: skip
            noise = interleave(to_uniform(a), to_uniform(b), to_uniform(c), to_uniform(d))
            value = s + to_gumbel(noise)
        token = tl.where(value > best, index, token)
        best = tl.where(value > best, value, best)
    at = entry.to(tl.int64) * n_splits + split
    winner = tl.max(best, 0)
    step = entries.to(tl.int64) * n_splits
    tl.store(parts + at, winner)
    tl.store(part_token + at, tl.min(tl.where(best == winner, token, NOBODY), 0))
    peak = tl.max(high, 0)
    finite = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(parts + step + at, tl.where(tl.max(bad, 0) > 0, float("nan"), peak))
    tl.store(parts + 2 * step + at, tl.sum(total * tl.exp(high - finite), 0))


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    parts, part_token, forced, tokens, peaks, lses, n_splits, is_greedy, has_forced
):  # fmt: skip
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
    if is_greedy != 0:  # certain, or no law
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


def refuse_sample_frozen(
    logits: Tensor,
    branches: int,
    settings: Settings,
    mask: Tensor | None,
    seeds: Tensor,
    items: Tensor,
    slots: Tensor,
    purpose: Tensor,
    forced: Tensor | None = None,
) -> str | None:
    """What keeps this twin from such arguments; None if nothing does."""
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"logits: expected float32, float16 or bfloat16, received {logits.dtype}"
    if logits.shape[-1] > 1 and logits.stride(-1) != 1:
        return (
            "logits: expected neighbouring tokens side by side in memory, received a stride of "
            f"{logits.stride(-1)}; call contiguous()"
        )
    if not 1 <= branches <= 3:
        return f"branches: expected 1, 2 or 3, received {branches}"
    return None


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
) -> Sampled:
    """See `mmaccel.kernels.sample.sample_frozen`. Cost: 2 launches, 11 with top-k,
    13 with top-p, 22 with both, 3 with min-p alone.
    """
    batch, width, n_values = logits.shape[0] // branches, logits.shape[1], logits.shape[2]
    entries, n_splits = batch * width, triton.cdiv(n_values, CHUNK.value)
    made = allocate(entries, n_splits, logits.device)
    if not entries:
        return Sampled(*(value.view(batch, width) for value in made.results))
    grid = (entries, n_splits)
    greedy = settings.temperature == 0
    allowed = logits if mask is None else mask.expand(batch, width, -1).view(torch.uint8)
    if mask is not None and allowed.stride(-1) != 1:
        allowed = allowed.contiguous()
    common = (
        n_values, n_splits, width, logits.stride(0), logits.stride(1), batch * logits.stride(0),
        allowed.stride(0), allowed.stride(1), int(mask is not None), branches,
        float(settings.scale), float(settings.second_scale),
        1.0 if greedy else float(settings.temperature),
    )  # fmt: skip
    top_k = 0 if greedy or (settings.top_k or n_values) >= n_values else settings.top_k
    top_p = 0.0 if greedy or (settings.top_p or 1.0) >= 1 else settings.top_p
    min_p = 0.0 if greedy else settings.min_p or 0.0
    read = (logits, allowed)
    if top_p or min_p:
        survey_kernel[grid](*read, made.peaks, made.floors[0], made.ties, *common, 0, **PLAIN)
    for phase, wanted in enumerate((top_k, top_p)):
        if not wanted:
            continue
        descent = (made.lows, made.aboves, made.sums)
        for level in range(LEVELS.value):
            level_kernel[grid](
                *read, made.peaks, *descent, made.floors[0], *common, float(wanted), phase, level,
                int(phase and bool(top_k)), **PLAIN,
            )  # fmt: skip
        ends = (made.floors[phase], made.last[0], made.last[1])
        settle_kernel[(entries,)](*descent, *ends, n_splits, float(wanted), phase)
    if top_p:
        survey_kernel[grid](*read, made.peaks, made.floors[1], made.ties, *common, 1, **PLAIN)
    _sample_kernel[grid](
        *read, made.peaks, made.ties, made.floors, made.last, seeds.contiguous(),
        items.contiguous(), slots.contiguous(), purpose, *made.parts, *common, int(not greedy),
        int(bool(top_k)), int(bool(top_p)), int(bool(min_p)), math.log(min_p or 1.0), **PLAIN,
    )  # fmt: skip
    known = slots if forced is None else forced.contiguous()
    _merge_kernel[(entries,)](
        *made.parts, known, *made.results, n_splits, int(greedy), int(forced is not None)
    )
    return Sampled(*(value.view(batch, width) for value in made.results))


_READ = {
    "n_values": "i32", "n_splits": "i32", "width": "i32", "row_stride": "i64",
    "slot_stride": "i32", "branch_stride": "i64", "mask_row_stride": "i32",
    "mask_slot_stride": "i32", "has_mask": "i32", "branches": "i32", "scale": "fp32",
    "second_scale": "fp32", "temperature": "fp32",
}  # fmt: skip
_TYPES = {
    "lows": "*i32", "floors": "*i32", "ties": "*i32",
    "part_token": "*i32", "mask": "*u8", "seeds": "*i64", "items": "*i64", "slots": "*i64",
    "purpose": "*i64", "forced": "*i64", "tokens": "*i64", "wanted": "fp32", "log_min_p": "fp32",
    "counts": "i32", "is_share": "i32", "level": "i32", "has_floor": "i32", "has_noise": "i32",
    "has_k": "i32", "has_p": "i32", "has_min": "i32", "is_greedy": "i32", "has_forced": "i32",
}  # fmt: skip


def _build(kernel: Any, logits: str, registers: int) -> Build:
    types = {**dict.fromkeys(kernel.arg_names, "*fp32"), **_READ, **_TYPES, "logits": logits}
    signature = {name: types[name] for name in kernel.arg_names}
    pointers = tuple(name for name, kind in signature.items() if kind.startswith("*"))
    return Build(kernel, signature, {}, WARPS, 3, registers, pointers)


def builds() -> list[Build]:
    """Every configuration this file launches; half precision is read like bfloat16."""
    return [
        _build(_sample_kernel, "*bf16", 128),
        _build(_sample_kernel, "*fp32", 128),
        _build(level_kernel, "*bf16", 128),
        _build(survey_kernel, "*bf16", 96),
        _build(settle_kernel, "*bf16", 64),
        _build(_merge_kernel, "*bf16", 64),
    ]
