"""One step of maximal coupling in Triton, several programs a row.

Programs of 4096 tokens each find their largest score and sum of exponentials; a second launch
writes the target distribution and adds up its mass and the residual's, one float64 number a split;
last, one program a row picks the split its uniform falls into and scans that split alone.

Departures: probabilities may differ from torch's softmax in their last bits, and sums are added in
another order, so that a coin or a redraw within rounding of a boundary may fall otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.kernels.build import Build
from mmaccel.kernels.couple import Coupled
from mmaccel.kernels.takes import Takes

CHUNK = tl.constexpr(4096)  # tokens a program reads
BLOCK = tl.constexpr(512)  # of them at a time
PART = tl.constexpr(64)  # splits merged at a time
WARPS = 4


TAKES = {"scores": Takes((torch.float32,)), "p_draft": Takes((torch.float32,))}


@triton.jit
def _norms_kernel(scores, highs, sums, n_values, n_splits, width, row_stride, slot_stride):  # type: ignore[no-untyped-def]
    """Every split's largest score, NaN left out, and its sum of exponentials below that."""
    entry, split = tl.program_id(0), tl.program_id(1)
    row = (entry // width).to(tl.int64)
    slot = (entry % width).to(tl.int64)
    high = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    start = split * CHUNK
    for first in range(start, tl.minimum(start + CHUNK, n_values), BLOCK):
        index = first + tl.arange(0, BLOCK)
        pointer = scores + row * row_stride + slot * slot_stride + index
        s = tl.load(pointer, mask=index < n_values, other=float("-inf"))
        higher = tl.where(s > high, s, high)
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(high - finite) + tl.exp(s - finite)
        high = higher
    peak = tl.max(high, 0)
    finite = tl.where(peak == float("-inf"), 0.0, peak)
    at = entry.to(tl.int64) * n_splits + split
    tl.store(highs + at, peak)
    tl.store(sums + at, tl.sum(total * tl.exp(high - finite), 0))


@triton.jit
def _row_norm(highs, sums, entry, n_splits):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, PART)
    base = entry.to(tl.int64) * n_splits
    high = tl.full([PART], float("-inf"), tl.float32)
    for first in range(0, n_splits, PART):
        part = first + lane
        value = tl.load(highs + base + part, mask=part < n_splits, other=float("-inf"))
        high = tl.where(value > high, value, high)
    peak = tl.max(high, 0)
    finite = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.zeros([PART], tl.float32)
    for first in range(0, n_splits, PART):
        part = first + lane
        value = tl.load(highs + base + part, mask=part < n_splits, other=float("-inf"))
        mass = tl.load(sums + base + part, mask=part < n_splits, other=0.0)
        total += mass * tl.exp(value - finite)
    return peak, tl.sum(total, 0)


@triton.jit
def _targets_kernel(  # type: ignore[no-untyped-def]
    scores,
    drafted,
    highs,
    sums,
    targets,
    masses,
    n_values,
    n_splits,
    width,
    row_stride,
    slot_stride,
    draft_row_stride,
    draft_slot_stride,
):
    """Targets, and splits' masses `[2, entry, split]` of residual (bonus: target) and target."""
    entry, split = tl.program_id(0), tl.program_id(1)
    row = (entry // width).to(tl.int64)
    slot = (entry % width).to(tl.int64)
    peak, norm = _row_norm(highs, sums, entry, n_splits)
    rest_mass = tl.zeros([BLOCK], tl.float64)
    mass = tl.zeros([BLOCK], tl.float64)
    n_drafted = tl.where(slot < width - 1, n_values, 0)
    start = split * CHUNK
    for first in range(start, tl.minimum(start + CHUNK, n_values), BLOCK):
        index = first + tl.arange(0, BLOCK)
        valid = index < n_values
        pointer = scores + row * row_stride + slot * slot_stride + index
        s = tl.load(pointer, mask=valid, other=float("-inf"))
        p = tl.div_rn(tl.exp(s - peak), norm)
        tl.store(targets + entry.to(tl.int64) * n_values + index, p, mask=valid)
        at = drafted + row * draft_row_stride + slot * draft_slot_stride + index
        q = tl.load(at, mask=index < n_drafted, other=0.0)
        mass += tl.where(valid, p, 0.0).to(tl.float64)
        rest_mass += tl.where(valid & (p > q), p - q, 0.0).to(tl.float64)
    at = entry.to(tl.int64) * n_splits + split
    step = tl.num_programs(0).to(tl.int64) * n_splits
    tl.store(masses + at, tl.sum(rest_mass, 0))
    tl.store(masses + step + at, tl.sum(mass, 0))


@triton.jit
def _draw_kernel(  # type: ignore[no-untyped-def]
    targets,
    drafted,
    masses,
    drafts,
    coins,
    redraws,
    kept,
    verified,
    n_values,
    n_splits,
    width,
    draft_row_stride,
    draft_slot_stride,
):
    """Whether a slot's draft stays, and its token."""
    entry = tl.program_id(0)
    entries = tl.num_programs(0)
    row = (entry // width).to(tl.int64)
    slot = (entry % width).to(tl.int64)
    has_draft = slot < width - 1
    lane = tl.arange(0, PART)
    base = entry.to(tl.int64) * n_splits
    # the mass that is drawn from: of the residual, or of the target where nothing is left of it
    total = tl.full([], 0.0, tl.float64)
    for first in range(0, n_splits, PART):
        part = first + lane
        total += tl.sum(tl.load(masses + base + part, mask=part < n_splits, other=0.0), 0)
    has_rest = tl.where(total > 0, 1, 0)
    if total <= 0:  # p equals q
        base += entries.to(tl.int64) * n_splits
        for first in range(0, n_splits, PART):
            part = first + lane
            total += tl.sum(tl.load(masses + base + part, mask=part < n_splits, other=0.0), 0)
    # the split in which the running mass passes the uniform, and the mass before it
    target = tl.load(redraws + entry).to(tl.float64) * total
    split = tl.full([], 0, tl.int32)
    before = tl.full([], 0.0, tl.float64)
    reached = tl.full([], 0.0, tl.float64)
    for first in range(0, n_splits, PART):
        part = first + lane
        mass = tl.load(masses + base + part, mask=part < n_splits, other=0.0)
        passed = (reached + tl.cumsum(mass, 0) <= target) & (part < n_splits)
        split += tl.sum(passed.to(tl.int32), 0)
        before += tl.sum(tl.where(passed, mass, 0.0), 0)
        reached += tl.sum(mass, 0)
    # the token in that split
    n_drafted = tl.where(has_draft & (has_rest != 0), n_values, 0)
    start = tl.minimum(split, n_splits - 1) * CHUNK
    found, last = start, start
    p_line = targets + entry.to(tl.int64) * n_values
    q_line = drafted + row * draft_row_stride + slot * draft_slot_stride
    for first in range(start, tl.minimum(start + CHUNK, n_values), BLOCK):
        index = first + tl.arange(0, BLOCK)
        valid = index < n_values
        p = tl.load(p_line + index, mask=valid, other=0.0)
        q = tl.load(q_line + index, mask=index < n_drafted, other=0.0)
        weight = tl.where(valid & (p > q), p - q, 0.0).to(tl.float64)
        passed = (before + tl.cumsum(weight, 0) <= target) & valid
        found += tl.sum(passed.to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0, index, 0), 0))
        before += tl.sum(weight, 0)
    token = tl.minimum(found, last).to(tl.int64)  # a sum's rounding draws no token of weight 0
    if has_draft:
        at = entry - row  # of [B, W-1], which has a slot less in every row
        draft = tl.load(drafts + at)
        stays = tl.load(coins + at) * tl.load(q_line + draft) < tl.load(p_line + draft)
        tl.store(kept + at, stays.to(tl.uint8))
        token = tl.where(stays, draft, token)
    tl.store(verified + entry, token)


def couple(
    scores: Tensor, p_draft: Tensor, drafts: Tensor, coins: Tensor, redraws: Tensor
) -> Coupled:
    """Cost: three launches; reads the scores twice, the drafts' distributions once."""
    batch, width, n_values = scores.shape
    entries = batch * width
    n_splits = triton.cdiv(n_values, CHUNK.value)
    device = scores.device
    targets = torch.empty(batch, width, n_values, dtype=torch.float32, device=device)
    norms = torch.empty(2, entries, n_splits, dtype=torch.float32, device=device)
    masses = torch.empty(2, entries, n_splits, dtype=torch.float64, device=device)
    kept = torch.empty(batch, width - 1, dtype=torch.bool, device=device)
    verified = torch.empty(batch, width, dtype=torch.int64, device=device)
    if not entries:
        return Coupled(targets, kept, verified)
    sizes = (n_values, n_splits, width)
    strides, others = scores.stride()[:2], p_draft.stride()[:2]
    grid = (entries, n_splits)
    _norms_kernel[grid](scores, norms[0], norms[1], *sizes, *strides, num_warps=WARPS)
    _targets_kernel[grid](
        scores,
        p_draft,
        norms[0],
        norms[1],
        targets,
        masses,
        *sizes,
        *strides,
        *others,
        num_warps=WARPS,
    )
    _draw_kernel[(entries,)](
        targets,
        p_draft,
        masses,
        drafts.contiguous(),
        coins.contiguous(),
        redraws.contiguous(),
        kept.view(torch.uint8),
        verified,
        *sizes,
        *others,
        num_warps=WARPS,
    )
    return Coupled(targets, kept, verified)


def _build(kernel: Any, registers: int) -> Build:
    kinds = {"masses": "*fp64", "drafts": "*i64", "kept": "*u8", "verified": "*i64"}
    kinds |= dict.fromkeys(("n_values", "n_splits", "width"), "i32")
    kinds |= {"row_stride": "i64", "slot_stride": "i32"}
    kinds |= {"draft_row_stride": "i64", "draft_slot_stride": "i32"}
    return Build.of(kernel, kinds, {}, WARPS, 3, registers, other="*fp32")


def builds() -> list[Build]:
    return [_build(_norms_kernel, 64), _build(_targets_kernel, 96), _build(_draw_kernel, 96)]
