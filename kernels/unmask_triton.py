"""Canvas statistics in Triton: every logit of an open position is read once.

A program goes through a part of a row's vocabulary and keeps a running maximum, the sum of exp(l -
maximum) and of (l - maximum) exp(l - maximum), the two largest logits and the best noisy one; when
the maximum rises by d, both sums are rescaled: sum (l - m - d) e^(l - m - d) = e^-d (second sum - d
* first sum). A second kernel merges the parts of a row, which depend on V alone, so that results do
not depend on the batch. M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax",
2018, arXiv 1805.02867.

Departures: sums run in another order than torch's, and the noise's logarithms may differ in the
last bit, so that at a temperature either of two equally good tokens may be drawn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.kernels.build import Build
from mmaccel.kernels.noise_triton import interleave, to_gumbel, to_uniform, words
from mmaccel.kernels.takes import COMMON, Takes
from mmaccel.kernels.unmask import Unmasked

BLOCK = 1024  # logits at a time, four for each Philox block
PART = 8192  # logits a program, unless that makes more than PARTS of a row
PARTS = 64
ROWS = 8  # rows a program of the second kernel
WARPS = 4


TAKES = {"logits": Takes(COMMON)}


@triton.jit
def _part_kernel(  # type: ignore[no-untyped-def]
    logits, masked, seeds, items, slots, purpose, floats, ids,
    n_positions, n_rows, n_values, part, row_stride, position_stride, temperature,
    GREEDY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0)
    if tl.load(masked + entry) != 0:
        row = entry // n_positions
        position = entry % n_positions
        line = logits + row.to(tl.int64) * row_stride + position.to(tl.int64) * position_stride
        seed, item = tl.load(seeds + row), tl.load(items + row)
        slot = tl.load(slots + entry)
        use = tl.load(purpose)
        high = tl.full([], float("-inf"), tl.float32)
        second = high
        first_sum = tl.full([], 0.0, tl.float32)
        second_sum = first_sum
        best = high
        token = tl.full([], 0, tl.int32)
        chosen = high
        begin = tl.program_id(1) * part
        end = tl.minimum(begin + part, n_values)
        for start in range(begin, end, BLOCK):
            index = start + tl.arange(0, BLOCK)
            x = tl.load(line + index, mask=index < end, other=float("-inf")).to(tl.float32)
            # the two largest logits so far: `runner` is the second of this block
            top = tl.max(x, 0)
            at = tl.min(tl.where(x == top, index, n_values), 0)
            runner = tl.max(tl.where(index == at, float("-inf"), x), 0)
            second = tl.maximum(tl.minimum(high, top), tl.maximum(second, runner))
            # sums of exp(l - maximum) and of (l - maximum) exp(l - maximum), rescaled
            raised = tl.maximum(high, top)
            safe = tl.where(raised == float("-inf"), 0.0, raised)
            drop = tl.where(high == float("-inf"), 0.0, high - safe)
            scale = tl.exp(drop)
            less = tl.where(x == float("-inf"), 0.0, x - safe)
            weight = tl.where(x == float("-inf"), 0.0, tl.exp(less))
            second_sum = scale * (second_sum + drop * first_sum) + tl.sum(less * weight, 0)
            first_sum = scale * first_sum + tl.sum(weight, 0)
            high = raised
            noisy = x  # the block's noise: four values of each Philox block
            if not GREEDY:
                blocks = start // 4 + tl.arange(0, BLOCK // 4)
                a, b, c, d = words(seed, slot, item, use, blocks)
                uniform = interleave(to_uniform(a), to_uniform(b), to_uniform(c), to_uniform(d))
                noisy = x + temperature * to_gumbel(uniform)
            leads = tl.max(noisy, 0)
            lowest = tl.min(tl.where(noisy == leads, index, n_values), 0)
            logit = tl.max(tl.where(index == lowest, x, float("-inf")), 0)
            token = tl.where(leads > best, lowest, token)
            chosen = tl.where(leads > best, logit, chosen)
            best = tl.maximum(leads, best)
        # six numbers a part and row, `[parts, 6, rows]`
        to = floats + tl.program_id(1).to(tl.int64) * 6 * n_rows + entry
        n = tl.full([], 0, tl.int64) + n_rows
        tl.store(to, high)
        tl.store(to + n, second)
        tl.store(to + 2 * n, first_sum)
        tl.store(to + 3 * n, second_sum)
        tl.store(to + 4 * n, best)
        tl.store(to + 5 * n, chosen)
        tl.store(ids + tl.program_id(1).to(tl.int64) * n_rows + entry, token)


@triton.jit
def _join_kernel(  # type: ignore[no-untyped-def]
    floats,
    ids,
    masked,
    tokens,
    confidences,
    entropies,
    gaps,
    peaks,
    n_rows,
    n_parts,
    n_values,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    parts = tl.arange(0, PARTS)
    inside = rows < n_rows
    wanted = tl.load(masked + rows, mask=inside, other=0) != 0
    mask = wanted[:, None] & (parts < n_parts)[None, :]
    n = tl.full([], 0, tl.int64) + n_rows
    source = floats + parts[None, :].to(tl.int64) * 6 * n + rows[:, None]
    highs = tl.load(source, mask, other=float("-inf"))
    seconds = tl.load(source + n, mask, other=float("-inf"))
    first_sums = tl.load(source + 2 * n, mask, other=0.0)
    second_sums = tl.load(source + 3 * n, mask, other=0.0)
    bests = tl.load(source + 4 * n, mask, other=float("-inf"))
    chosens = tl.load(source + 5 * n, mask, other=float("-inf"))
    candidates = tl.load(ids + parts[None, :].to(tl.int64) * n + rows[:, None], mask, other=0)

    # as within a part: the largest of all parts, the second, and the rescaled sums
    high = tl.max(highs, 1)
    is_open = high > float("-inf")
    safe = tl.where(is_open, high, 0.0)
    holder = tl.min(tl.where(highs == high[:, None], parts[None, :], PARTS), 1)
    others = tl.where(parts[None, :] == holder[:, None], float("-inf"), highs)
    second = tl.maximum(tl.max(seconds, 1), tl.max(others, 1))
    drop = tl.where(highs == float("-inf"), 0.0, highs - safe[:, None])
    scale = tl.exp(drop)
    first_sum = tl.sum(scale * first_sums, 1)
    second_sum = tl.sum(scale * (second_sums + drop * first_sums), 1)
    first_sum = tl.where(is_open, first_sum, 1.0)
    best = tl.max(bests, 1)
    leads = bests == best[:, None]
    token = tl.min(tl.where(leads, candidates, n_values), 1)
    logit = tl.max(tl.where(leads & (candidates == token[:, None]), chosens, float("-inf")), 1)

    peak = 1.0 / first_sum
    confidence = tl.exp(logit - safe) * peak
    gap = peak - tl.exp(second - safe) * peak
    entropy = tl.maximum(tl.log(first_sum) - second_sum * peak, 0.0)
    none = float("-inf")
    tl.store(tokens + rows, tl.where(is_open, token, -1).to(tl.int64), mask=inside)
    tl.store(confidences + rows, tl.where(is_open, confidence, none), mask=inside)
    tl.store(entropies + rows, tl.where(is_open, entropy, -none), mask=inside)
    tl.store(gaps + rows, tl.where(is_open, gap, none), mask=inside)
    tl.store(peaks + rows, tl.where(is_open, peak, none), mask=inside)


def unmask(
    logits: Tensor,
    masked: Tensor,
    temperature: float,
    seeds: Tensor,
    items: Tensor,
    slots: Tensor,
    purpose: Tensor,
) -> Unmasked:
    """Cost: two launches."""
    batch, n_positions, n_values = logits.shape
    n_rows = batch * n_positions
    device = logits.device
    part = max(PART, triton.cdiv(triton.cdiv(n_values, PARTS), BLOCK) * BLOCK)
    n_parts = triton.cdiv(n_values, part)
    floats = torch.empty(n_parts, 6, n_rows, dtype=torch.float32, device=device)
    ids = torch.empty(n_parts, n_rows, dtype=torch.int32, device=device)
    tokens = torch.empty(batch, n_positions, dtype=torch.int64, device=device)
    measured = torch.empty(4, batch, n_positions, dtype=torch.float32, device=device).unbind()
    if n_rows:
        is_masked = masked.contiguous()
        _part_kernel[(n_rows, n_parts)](
            logits, is_masked, seeds.contiguous(), items.contiguous(), slots.contiguous(), purpose,
            floats, ids, n_positions, n_rows, n_values, part, logits.stride(0), logits.stride(1),
            float(temperature), GREEDY=not temperature > 0, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
        _join_kernel[(triton.cdiv(n_rows, ROWS),)](
            floats,
            ids,
            is_masked,
            tokens,
            *measured,
            n_rows,
            n_parts,
            n_values,
            ROWS=ROWS,
            PARTS=PARTS,
            num_warps=WARPS,
        )
    return Unmasked(tokens, *measured)


def builds() -> list[Build]:
    """float16 compiles as bfloat16 does."""
    kinds = dict.fromkeys(("seeds", "items", "slots", "purpose", "tokens"), "*i64")
    kinds |= {"floats": "*fp32", "ids": "*i32", "masked": "*i1", "temperature": "fp32"}
    kinds |= dict.fromkeys(("confidences", "entropies", "gaps", "peaks"), "*fp32")
    all_builds = []
    for dtype in ("fp32", "bf16"):
        for greedy in (True, False):
            sizes = {"GREEDY": greedy, "BLOCK": BLOCK}
            types = kinds | {"logits": f"*{dtype}"}
            all_builds.append(Build.of(_part_kernel, types, sizes, WARPS, 2, 96, ["part"]))
    sizes = {"ROWS": ROWS, "PARTS": PARTS}
    return [*all_builds, Build.of(_join_kernel, kinds, sizes, WARPS, 2, 64)]
