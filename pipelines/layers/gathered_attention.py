"""Attention of a window on chosen blocks of keys, which are gathered first: for a CPU.

`mmaccel.kernels.window_attention` with `blocks` is the specification. On a GPU its kernel reads the
blocks in place; torch on a CPU would compute all scores and hide most of them. Here the keys and
values of the listed blocks are copied together, and attention is over those alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
        q: `[R, Hq, W, D]`.
        k, v: `[R, Hkv, S, D]`, any strides.
        start: `[R]` int64.
        scale, softcap, window, blocks: as there.
        reads: `[R, 1 or W, S]` bool, which keys a query sees, in place of those up to itself;
            one that sees none (padding) gives some number.

    Returns:
        `[R, Hq, W, D]` of q's dtype.

    Cost: a copy of the listed keys and values, and scores `[R, Hq, W, NB * size]`.
    """
    heads, capacity = k.shape[1:3]
    width = q.shape[2]
    offsets = torch.arange(blocks.size, device=k.device, dtype=torch.int32)
    at = blocks.index[..., None] * blocks.size + offsets  # [R, H, NB, P]
    rank = torch.arange(at.shape[2], device=k.device)[:, None]
    is_listed = (rank < blocks.count[..., None, None]) & (at < capacity) & (at >= 0)
    at = at.masked_fill(~is_listed, _NOWHERE).flatten(2)  # [R, H, M]

    index = at.clamp(max=capacity - 1).long()
    # a query sees listed keys up to its own position
    ahead = (at - start[:, None, None].int())[:, :, None]  # [R, H, 1, M], positions after the first
    entry = torch.arange(width, device=k.device, dtype=torch.int32)[:, None]  # [W, 1]
    hidden = ahead > entry
    if window is not None:
        hidden = hidden | (ahead <= entry - window)
    if reads is not None:
        wide = index[:, :, None].expand(-1, -1, reads.shape[1], -1)  # [R, H, 1 or W, M]
        hidden = (at == _NOWHERE)[:, :, None] | ~reads[:, None].expand(-1, heads, -1, -1).gather(
            3, wide
        )
    keys, values = _gather(k, index), _gather(v, index)  # [R, H, M, D]
    packed = q.unflatten(1, (heads, -1)).flatten(2, 3)  # [R, H, G W, D]
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (packed @ keys.mT).to(dtype).mul_(scale)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    groups = q.shape[1] // heads
    scores = scores.unflatten(2, (groups, width)).masked_fill_(
        hidden[:, :, None], torch.finfo(dtype).min
    )
    weights = scores.softmax(-1).to(values.dtype).flatten(2, 3)
    return (weights @ values).unflatten(2, (groups, width)).flatten(1, 2)


def _gather(states: Tensor, index: Tensor) -> Tensor:
    """Entries `[R, H, M, D]` of `[R, H, S, D]` at `index` `[R, H, M]`.

    On a CPU whole entries are copied by one `index_select` over the memory that the view is of: ten
    times as fast as an index of three tensors.
    """
    rows, heads, _, size = states.shape
    strides = states.stride()
    row = torch.arange(rows, device=states.device)[:, None, None]
    head = torch.arange(heads, device=states.device)[:, None]
    if strides[3] != 1 or any(stride % size for stride in strides[:3]):
        return states[row, head, index]
    steps = [stride // size for stride in strides[:3]]
    n_entries = 1 + sum((n - 1) * step for n, step in zip(states.shape, steps))
    memory = states.as_strided((n_entries, size), (size, 1))
    flat = row * steps[0] + head * steps[1] + index * steps[2]
    return memory.index_select(0, flat.flatten()).view(*index.shape, size)
