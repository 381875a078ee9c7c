"""What the model reads in the next pass: drafts into the token buffer, tokens and positions out.

A window covers slots n .. n + W - 1 of a row that has n tokens. The model reads the token before
each of them: the last one known, and W - 1 drafts. A draft is what the last pass predicted for its
slot, and elsewhere what a draft source proposes; a layout's forced tokens go before both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class WindowInputs(NamedTuple):
    """What a pass reads."""

    drafts: Tensor | None  # [B, W-1] int64; None where nothing was proposed
    tokens: Tensor  # [R, W] int64
    start: Tensor  # [R] int64, the position of the first of them


def window_inputs(
    tokens: Tensor,  # [B, N] int64, the token buffer, written to where drafts are proposed
    n_generated: Tensor,  # [B] int64, tokens generated so far
    filled: Tensor,  # [B] int64, first column that no pass has predicted
    last_of_prompt: Tensor,  # [R, 1] int64, of every row of every branch, branch-major
    lengths: Tensor,  # [R] int64, of the prompts
    proposed: Tensor | None,  # [B, W-1] int64; None where the buffer has all drafts already
    forced: Tensor | None,  # [B, W-1] int64, tokens known in advance, -1 elsewhere
    *,
    origin: int,  # column of slot 0, at least 1
    width: int,
) -> WindowInputs:
    """Write the window's drafts into the token buffer, and read the model's inputs from it.

    Cost: up to 12 operations in torch, one launch in Triton; no host synchronisation.
    """
    first = n_generated[:, None] + origin
    columns = torch.arange(width, device=tokens.device) + first  # [B, W], of the window's slots
    drafts = None
    if proposed is not None:
        at = columns[:, :-1]
        drafts = torch.where(at < filled[:, None], tokens.gather(1, at), proposed)
        if forced is not None:
            drafts = torch.where(forced >= 0, forced, drafts)
        tokens.scatter_(1, at, drafts)
    read = columns - 1  # a slot's token follows from the one before it
    last = last_of_prompt.view(-1, len(tokens), 1)  # [G, B, 1]
    inputs = torch.where(read < origin, last, tokens.gather(1, read))  # [G, B, W]
    start = lengths.view(-1, len(tokens)) - 1 + n_generated
    return WindowInputs(drafts, inputs.flatten(0, 1), start.flatten())


def count_new_drafts(n_generated: Tensor, filled: Tensor, *, origin: int, n_drafts: int) -> int:
    """How many draft slots at a window's end may lack a prediction; W - 1 if tensors are unread."""
    return n_drafts
