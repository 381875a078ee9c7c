"""Attention of a window of W queries on a long cache whose rows stand at positions of their own.

The window's own keys are in the cache already, at `start[r] ... start[r]+W-1`, and query w of row r
stands at position `start[r]+w`. It sees no position after its own; restrictions only remove
positions.

Departures: scores, softmax and sums are float32 whatever the inputs are. A query that sees nothing
gives zeros and a log-sum-exp of -inf, where softmax alone would give NaN. Keys and values that no
query of the row sees count as absent, even where they are NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """Which blocks of keys the queries of a key head see."""

    # [R, Hkv, NB] int32, in any order, each once, negative ones skipped; block b is the positions
    # b*size ... b*size+size-1
    index: Tensor
    count: Tensor  # [R, Hkv] int32, how many entries of `index` count
    size: int  # positions a block


def window_attention(
    q: Tensor,  # [R, Hq, W, D] float; query head h reads key head h // (Hq / Hkv)
    k: Tensor,  # [R, Hkv, S, D] of q's dtype, any strides; S is the capacity, not the length
    v: Tensor,  # [R, Hkv, S, Dv], the same
    start: Tensor,  # [R] int64, position of each row's first query
    *,
    scale: float,
    softcap: float | None = None,  # c: scores become c tanh(score / c)
    window: int | None = None,  # positions a query sees at most, itself included
    tree: Tensor | None = None,  # [W, W] or [R, W, W] bool, see below
    blocks: Blocks | None = None,
    ragged: bool = False,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of the window, `[R, Hq, W, Dv]` of q's dtype, and the log-sum-exp of the
    scores, `[R, Hq, W]` float32.

    A `tree` says which window entries (last axis) a window entry sees; positions after the window
    stay unseen. Where rows differ much in length, or key heads in the number of their blocks, a GPU
    shares its work out by lengths if they are `ragged`, which changes the order of sums alone.
    `num_splits` is into how many parts a GPU splits the keys of every row, whatever `ragged` says;
    with 1 a query has the same bits at any width and batch.

    Cost: float32 scores `[R, Hq, W, S]` and float32 copies of keys and values; no host sync.
    """
    seen = find_seen(q.shape[2], k, start, window=window, tree=tree, blocks=blocks)
    return attend_where(q, k, v, seen, scale=scale, softcap=softcap)


def attend_where(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """As `window_attention`, of queries of which is `seen` `[R, Hkv or 1, W, S]` bool."""
    heads = k.shape[1]
    scores = score(q, k, scale, softcap).where(seen[:, :, None], float("-inf"))
    total = scores.logsumexp(-1)  # [R, Hkv, G, W]
    weights = (scores - total.where(total.isfinite(), 0.0)[..., None]).exp()
    values = v.float().where(seen.any(2)[..., None], 0.0)
    out = (weights.flatten(2, 3) @ values).unflatten(2, (q.shape[1] // heads, -1))
    return out.flatten(1, 2).to(q.dtype), total.flatten(1, 2)


def score(q: Tensor, k: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """Scores `[R, Hkv, G, W, S]` float32 of `[R, Hq, W, D]` queries, G = Hq / Hkv."""
    group = q.shape[1] // k.shape[1]
    packed = q.float().unflatten(1, (-1, group)).flatten(2, 3)  # [R, Hkv, G W, D]
    scores = (packed @ k.float().transpose(2, 3)).unflatten(2, (group, -1)) * scale
    return scores if softcap is None else softcap * (scores / softcap).tanh()


def find_seen(
    width: int,
    k: Tensor,
    start: Tensor,
    *,
    window: int | None = None,
    tree: Tensor | None = None,
    blocks: Blocks | None = None,
) -> Tensor:
    """Which positions each query sees: `[R, Hkv or 1, W, S]` bool."""
    capacity = k.shape[2]
    n = torch.arange(capacity, device=k.device)
    query = start[:, None, None] + torch.arange(width, device=k.device)[:, None]  # [R, W, 1]
    seen = n <= query
    if window is not None:
        seen = seen & (query - n < window)
    if tree is not None:
        entry = n - start[:, None, None]  # [R, 1, S]
        is_inside = (entry >= 0) & (entry < width)
        index = entry.clamp(0, width - 1).expand(-1, width, -1)
        seen = seen & (~is_inside | tree.expand(len(start), -1, -1).gather(2, index))
    if blocks is None:
        return seen[:, None]
    n_blocks = -(-capacity // blocks.size)
    index = blocks.index.long()
    rank = torch.arange(index.shape[2], device=k.device)
    counts = (rank < blocks.count[..., None]) & (index >= 0) & (index < n_blocks)
    listed = torch.zeros(*index.shape[:2], n_blocks + 1, dtype=torch.bool, device=k.device)
    listed.scatter_(2, index.where(counts, n_blocks), True)  # a surplus block takes the others
    listed = listed[..., :n_blocks].repeat_interleave(blocks.size, 2)[..., :capacity]
    return seen[:, None] & listed[:, :, None]
