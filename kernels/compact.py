"""Compaction of a cache in place: the positions to keep are moved together.

Rejecting branches of a tree (X. Miao et al., 2024, arXiv:2305.09781, section 5) and evicting keys
(Y. Li et al., 2024, arXiv:2404.14469) leave a cache with holes. The positions to keep are listed in
ascending order, so that a position only ever moves to the front.

Departures: the caller corrects rotary embeddings in the keys.
"""

from __future__ import annotations

import torch
from torch import Tensor


def compact(store: Tensor, keep: Tensor, start: Tensor | None = None) -> Tensor:
    """Move position `keep[..., i]` of `store` `[R, S, H, D]` to position `start + i`, in place;
    others are as they were.

    `keep` is `[R, K]`, or `[R, H, K]` for a list of each head's own: positions in ascending order,
    each at least `start + i`; shorter lists end in -1. `start` is `[R]` int64; None: 0.

    Cost: a copy of the positions to keep; no host synchronisation.
    """
    _, size, heads, width = store.shape
    if keep.numel() == 0 or store.numel() == 0:
        return store
    lists = (keep if keep.ndim == 3 else keep[:, None].expand(-1, heads, -1)).long()
    first = torch.zeros_like(lists[:, :1, :1]) if start is None else start[:, None, None]
    is_kept = lists >= 0
    target = (first + torch.arange(lists.shape[2], device=store.device)).expand_as(lists)
    # an entry of -1 repeats the first move of its list, or moves one position to itself
    source = lists.where(is_kept, lists[..., :1].where(is_kept[..., :1], target[..., :1]))
    target = target.where(is_kept, target[..., :1])
    source, target = (
        index.clamp(0, size - 1).transpose(1, 2)[..., None].expand(-1, -1, -1, width)
        for index in (source, target)
    )
    return store.scatter_(1, target, store.gather(1, source))
