"""Parallel rounds of coarse drafts in Triton: one launch a round, one program a slot.

Idea: a slot reads the tokens that the round before has left and writes into another copy of them,
so that no program waits for another. What a program makes of its slot is `draft_slot`, the step of
a sweep. Rounds are as many as were asked for, and none is skipped: what a launch does may depend on
tensors, how many there are may not, so that they can be captured.

Reads: as a sweep in every round; but by as many multiprocessors as there are slots.

Departures: none; products are summed in another order than torch's, so that near-ties may fall
otherwise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.kernels.build import Build
from mmaccel.kernels.coarse_rounds import Redrafted
from mmaccel.kernels.coarse_sweep import SweepSlots, SweepWeights
from mmaccel.kernels.coarse_sweep_triton import (
    block_sizes,
    builds_of,
    draft_slot,
    refuse_coarse_sweep,
)

_WARPS = 8  # of a program; with 4 or 16 some builds spill registers; no GPU has timed them


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
    draft = draft_slot(
        table, inner, inner_bias, head, head_bias, neighbours, is_seen, is_fixed, seen, base,
        hidden_seen, ids, values, last + batch_row * n_values, gates, noise,
        work + batch_row * n_columns, layer + at * width, at, before + at, out,
        n_neighbours, width, n_candidates, n_corrected, n_values, scale, WIDTH, ROWS,
    )  # fmt: skip
    tl.store(out, draft)
    tl.store(drafts + at, draft)


def refuse_coarse_rounds(
    weights: SweepWeights,
    slots: SweepSlots,
    work: Tensor,
    scale: float,
    n_corrected: int,
    rounds: int,
) -> str | None:
    """Why this version cannot take such arguments; None if it can."""
    return refuse_coarse_sweep(weights, slots, work, scale, n_corrected)


def coarse_rounds(
    weights: SweepWeights,
    slots: SweepSlots,
    work: Tensor,
    scale: float,
    n_corrected: int,
    rounds: int,
) -> Redrafted:
    """See `mmaccel.kernels.coarse_rounds.coarse_rounds`. Cost: a launch a round."""
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


def builds() -> list[Build]:
    """Every configuration this file launches: widths up to 16, 32 … 512."""
    return builds_of(_round_kernel, lambda width: _WARPS)
