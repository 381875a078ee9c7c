"""The line: prompt, tokens and drafts of a batch in one tensor, and where a row of it ends.

A row's prompt stands right-aligned, so that slot i of every row has the same column; what a model
calls a position is counted from the row's own first token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import Prompt
from mmaccel.errors import ShapeError

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def open_line(prompt: Prompt, room: int, origin: int) -> Tensor:
    """The line before the first token.

    Args:
        prompt: its first `batch` rows (the conditional branch) are written.
        room: columns behind the prompt, for tokens and drafts.
        origin: column of slot 0, at least T.

    Returns:
        `[B, origin + room]` int64: -1, then the prompt, then 0 from slot 0 on.
    """
    batch = prompt.batch
    shift = origin - prompt.lengths[:batch, None]
    index = torch.arange(origin, device=prompt.tokens.device)[None] - shift  # [B, origin]
    aligned = prompt.tokens[:batch].gather(1, index.clamp(min=0))
    aligned = torch.where(index >= 0, aligned, -1)
    return torch.cat([aligned, aligned.new_zeros(batch, room)], 1)


def last_tokens(prompt: Prompt) -> Tensor:
    """Last prompt token of every row of every branch, `[R, 1]` int64."""
    return prompt.tokens.gather(1, prompt.lengths[:, None] - 1)


def cut_at_stop(tokens: Tensor, n_new: Tensor, stop_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """End rows behind their first stop token.

    Args:
        tokens: `[B, W]` int64, new tokens.
        n_new: `[B]` int64, how many of them count.
        stop_tokens: `[S]` int64.

    Returns:
        How many count now, `[B]` int64 (the stop token is the last), and which rows ended, `[B]`
        bool.
    """
    width = tokens.shape[1]
    index = torch.arange(width, device=tokens.device)[None]
    stops = (tokens[..., None] == stop_tokens).any(-1) & (index < n_new[:, None])
    first = torch.where(stops, index, width).amin(1)  # [B]
    return torch.minimum(n_new, first + 1), first < width


def check_limit(limit: Any, made: Tensor) -> Tensor:
    """What `on_step` returned, as lengths `[B]` int64, at least 0.

    Raises:
        ShapeError: it is no tensor like `made` `[B]`.
    """
    if isinstance(limit, Tensor) and limit.shape == made.shape and limit.dtype in _WHOLE:
        return limit.to(made).clamp(min=0)
    is_tensor = isinstance(limit, Tensor)
    received = f"{limit.dtype} {list(limit.shape)}" if is_tensor else repr(limit)
    raise ShapeError(
        f"on_step: expected None or whole lengths [{made.shape[0]}] in return, received "
        f"{received}; return progress.lengths to end every row"
    )
