"""How much a window wants each block of keys, by a summary of the block that follows the cache.

Sources: J. Tang et al., "Quest", ICML 2024 (arXiv:2406.10774), algorithm 1 (bounds); a block's mean
key, as many selectors have it; and what a method has summarised itself. The window's own keys are
in the cache already, so that the blocks that it has written are summarised anew before they are
scored.

Departures: scores are float32 whatever the inputs; blocks without entries of the row have -inf.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Kind = Literal["bounds", "means", "sums", "given"]
"""Largest and smallest keys; means; sums over the roots of numbers; what is there already."""


def block_scores(
    q: Tensor,  # [R, Hq, W, D] float; query head h reads key head h // (Hq / Hkv)
    k: Tensor,  # [R, Hkv, S, D] of q's dtype, any strides
    summaries: Tensor,  # [R, Hkv, N, D], of bounds [R, Hkv, N, 2 D]; N is S / size, rounded up
    start: Tensor,  # [R] int64, position of each row's first query
    *,
    size: int,  # positions a block
    kind: Kind,
    each: bool = False,
) -> Tensor:
    """Scores `[R, Hkv, N]` float32 of blocks, of the query that wants a block most; with `each`
    every query's, `[R, Hkv, G W, N]`, G = Hq / Hkv. Summaries of the blocks that the window has
    written in are written.

    Cost: float32 scores `[R, Hq, W, N]`; no host sync.
    """
    heads, room = k.shape[1:3]
    width = q.shape[2]
    n_blocks = summaries.shape[2]
    ends = (start + width).clamp(max=room)
    block = torch.arange(n_blocks, device=k.device)
    if kind != "given":
        row = torch.arange(len(k), device=k.device)
        for number in range((width + size - 2) // size + 1):
            written = start // size + number  # [R]
            at = written[:, None] * size + torch.arange(size, device=k.device)
            index = at.clamp(max=room - 1)
            keys = k.transpose(1, 2)[row[:, None], index].transpose(1, 2)  # [R, H, P, D]
            is_real = (at < ends[:, None])[:, None, None, :, None]
            new_summaries = summarise(keys[:, :, None], is_real, kind)[:, :, 0]  # [R, H, C]
            target = written.clamp(max=n_blocks - 1)
            is_written = (written * size < ends)[:, None, None]
            summaries[row, :, target] = new_summaries.where(is_written, summaries[row, :, target])
    queries = q.float().unflatten(1, (heads, -1)).flatten(2, 3)  # [R, H, G W, D]
    if kind == "bounds":
        queries = torch.cat([queries.relu(), (-queries).relu()], -1)
    scores = queries @ summaries.float().mT
    if not each:
        scores = scores.amax(2, keepdim=True)
    is_empty = block * size >= ends[:, None]
    scores = scores.masked_fill(is_empty[:, None, None], float("-inf"))
    return scores if each else scores.squeeze(2)


def summarise(keys: Tensor, is_real: Tensor, kind: Kind) -> Tensor:
    """Summaries of blocks of keys `[R, H, N, P, D]`: `[R, H, N, D]`, or of bounds the largest and
    the smallest keys, negated, `[R, H, N, 2 D]`; zeros of blocks of which nothing `is_real`
    `[R, 1, N, P, 1]`.
    """
    if kind == "bounds":
        high = keys.masked_fill(~is_real, float("-inf")).amax(3)
        low = keys.masked_fill(~is_real, float("inf")).amin(3)
        return torch.cat([high, -low], -1).masked_fill(~is_real.any(3), 0)
    sums = keys.float().where(is_real, 0).sum(3)
    count = is_real.sum(3).clamp(min=1)
    return (sums / (count.float().sqrt() if kind == "sums" else count)).to(keys.dtype)
