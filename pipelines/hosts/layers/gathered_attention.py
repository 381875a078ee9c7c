"""Attention of a window on chosen blocks of keys, for a CPU, where torch would compute all scores
and hide most: the listed keys and values are copied together first. The specification is
`mmaccel.kernels.window_attention` with `blocks`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.kernels.window_attention import Blocks

_NOWHERE = 2**30  # behind every query


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    *,
    scale: float,
    blocks: Blocks,
    softcap: float | None = None,
    window: int | None = None,
    reads: Tensor | None = None,
) -> Tensor:
    """As `window_attention`, for queries of which each sees a key: the window's own are listed.

    Args:
        q, k, v: `[R, Hq, W, D]`, and `[R, Hkv, S, D]` with any strides.
        start: `[R]` int64.
        reads: `[R, 1 or W, S]` bool, which keys a query sees, in place of those up to itself; one
            that sees none (padding) gives some number.

    Cost: a copy of the listed keys and values (values of a single query are read in place), and
    scores `[R, Hq, W, NB * size]`.
    """
    heads, capacity = k.shape[1:3]
    width = q.shape[2]
    size = min(blocks.size, capacity)
    begin = blocks.index * blocks.size  # [R, H, NB]
    # whole blocks are copied: the last one may begin before its first entry
    first = begin.clamp(0, capacity - size)
    offset = torch.arange(size, device=k.device, dtype=torch.int32)
    rank = torch.arange(begin.shape[2], device=k.device)
    begin = begin.masked_fill(rank >= blocks.count[..., None], _NOWHERE)
    at = first[..., None] + offset  # [R, H, NB, P]
    at = at.masked_fill(at < begin[..., None], _NOWHERE).flatten(2)  # [R, H, M]

    # a query sees listed keys up to its own position
    position = start.int()[:, None] + torch.arange(width, device=k.device, dtype=torch.int32)
    position = position[:, None, :, None]  # [R, 1, W, 1]
    hidden = at[:, :, None] > position
    if window is not None:
        hidden = hidden | (at[:, :, None] <= position - window)
    if reads is not None:
        index = (first[..., None] + offset).flatten(2).long()
        index = index[:, :, None].expand(-1, -1, reads.shape[1], -1)  # [R, H, 1 or W, M]
        seen = reads[:, None].expand(-1, heads, -1, -1).gather(3, index)
        hidden = (at == _NOWHERE)[:, :, None] | ~seen
    keys = _gather(k, first, size)  # [R, H, M, D]
    packed = q.unflatten(1, (heads, -1)).flatten(2, 3)  # [R, H, G W, D]
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (packed @ keys.mT).to(dtype).mul_(scale)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    groups = q.shape[1] // heads
    scores = scores.unflatten(2, (groups, width)).masked_fill_(
        hidden[:, :, None], torch.finfo(dtype).min
    )
    weights = scores.softmax(-1).to(v.dtype).flatten(2, 3)  # [R, H, G W, M]
    if packed.shape[2] == 1 and _stand_together(v):
        return _add_up(v, (first[..., None] + offset).flatten(2), weights)
    return (weights @ _gather(v, first, size)).unflatten(2, (groups, width)).flatten(1, 2)


def _stand_together(states: Tensor) -> bool:
    """Whether the entries of a head of `[R, H, S, D]` on a CPU stand side by side."""
    width = states.shape[3]
    rows, heads, entries, numbers = states.stride()
    is_whole = rows % width == heads % width == 0
    return states.device.type == "cpu" and (entries, numbers) == (width, 1) and is_whole


def _view_pieces(states: Tensor, index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """A view `[R, H, S, D]` as overlapping pieces `[n, size D]`, and those at `[R, H, M]`."""
    rows, heads, length, width = states.shape
    row_step = states.stride(0) // width
    head_step = states.stride(1) // width
    n_pieces = (rows - 1) * row_step + (heads - 1) * head_step + length - size + 1
    pieces = states.as_strided((n_pieces, size * width), (width, 1))
    row = torch.arange(rows, device=states.device)[:, None, None] * row_step
    head = torch.arange(heads, device=states.device)[:, None] * head_step
    return pieces, row + head + index


def _gather(states: Tensor, first: Tensor, size: int) -> Tensor:
    """The `size` entries from each of `first` `[R, H, NB]` on, `[R, H, NB size, D]`; where a head's
    stand side by side, by an `index_select` of whole blocks, many times as fast.
    """
    rows, heads, _, width = states.shape
    if _stand_together(states):
        pieces, number = _view_pieces(states, first, size)
        return pieces.index_select(0, number.flatten()).view(rows, heads, -1, width)
    row = torch.arange(rows, device=states.device)[:, None, None]
    head = torch.arange(heads, device=states.device)[:, None]
    at = first[..., None] + torch.arange(size, device=states.device)
    return states[row, head, at.flatten(2)]


def _add_up(values: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Values `[R, H, S, D]` at `index` `[R, H, M]`, weighed and added up: `[R, H, 1, D]`."""
    entries, number = _view_pieces(values, index, 1)
    rows, heads, n_listed = index.shape
    sums = F.embedding_bag(
        number.view(-1, n_listed),
        entries,
        mode="sum",
        per_sample_weights=weights.view(-1, n_listed),
    )
    return sums.view(rows, heads, 1, -1)
