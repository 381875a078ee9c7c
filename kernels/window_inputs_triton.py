"""A window's inputs in Triton: a program does one row of the token buffer, for all branches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.kernels.build import Build
from mmaccel.kernels.takes import Takes
from mmaccel.kernels.window_inputs import WindowInputs

WARPS = 1


TAKES = {"tokens": Takes()}


@triton.jit
def _window_inputs_kernel(  # type: ignore[no-untyped-def]
    tokens, n_generated, filled, last_of_prompt, lengths, proposed, forced, drafts, inputs, start,
    token_step, batch, width, branches, origin, W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    n_tokens = tl.load(n_generated + row)
    j = tl.arange(0, W)  # input j is the token before slot j of the window
    column = origin + n_tokens - 1 + j
    here = tokens + row.to(tl.int64) * token_step + column
    token = tl.load(here, mask=j < width, other=0)
    if proposed is not None:
        is_draft = (j > 0) & (j < width)
        at_draft = row * (width - 1) + j - 1
        new = tl.load(proposed + at_draft, mask=is_draft, other=0)
        is_new = is_draft & (column >= tl.load(filled + row))
        token = tl.where(is_new, new, token)
        if forced is not None:
            known = tl.load(forced + at_draft, mask=is_draft, other=-1)
            token = tl.where(known >= 0, known, token)
        tl.debug_barrier()
        tl.store(here, token, mask=is_draft)
        tl.store(drafts + at_draft, token, mask=is_draft)
    for branch in range(0, branches):
        entry = branch * batch + row
        last = tl.load(last_of_prompt + entry)
        read = tl.where(column < origin, last, token)
        tl.store(inputs + entry.to(tl.int64) * width + j, read, mask=j < width)
        tl.store(start + entry, tl.load(lengths + entry) - 1 + n_tokens)


def window_inputs(
    tokens: Tensor,
    n_generated: Tensor,
    filled: Tensor,
    last_of_prompt: Tensor,
    lengths: Tensor,
    proposed: Tensor | None,
    forced: Tensor | None,
    *,
    origin: int,
    width: int,
) -> WindowInputs:
    batch, rows = len(tokens), len(lengths)
    drafts = None
    if proposed is not None:
        proposed = proposed.contiguous()
        drafts = tokens.new_empty(batch, width - 1)
        forced = None if forced is None else forced.contiguous()
    inputs = tokens.new_empty(rows, width)
    start = torch.empty_like(lengths)
    if batch:
        _window_inputs_kernel[(batch,)](
            tokens, n_generated, filled, last_of_prompt, lengths, proposed, forced, drafts, inputs,
            start, tokens.stride(0), batch, width, rows // batch, origin,
            W=triton.next_power_of_2(width), num_warps=WARPS,
        )  # fmt: skip
    return WindowInputs(drafts, inputs, start)


def builds() -> list[Build]:
    return [_build(width) for width in (1, 64, 256)]


def _build(width: int) -> Build:
    kinds = dict.fromkeys(("batch", "width", "branches", "origin", "token_step"), "i32")
    return Build.of(_window_inputs_kernel, kinds, {"W": width}, WARPS, 2, 96, other="*i64")
