"""Eviction carried out: the queries that a method looks at, and the entries that stay.

While the prompt is processed an `Observer` keeps the queries of each row's last entries. When the
prompt is in the cache, `evict` asks the method layer by layer, moves what stays together and frees
the rest. Position and cache index differ from then on, by as many entries as a row lost in a layer;
the layer's `KVCacheLayout` alone knows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmaccel.pipelines.layers.store import KVCacheLayout, WindowLayer
from mmaccel.reduction.kv_cache.contract import CachedLayer, CacheMethod


class Observer:
    """A `Watcher` that keeps the queries of some columns of a prompt, by layer.

    Args:
        columns: `[R, n]` int64, columns of the prompt's pass; negative where a row has fewer.
    """

    def __init__(self, columns: Tensor) -> None:
        self._columns = columns.clamp(min=0)
        self.queries: dict[int, tuple[Tensor, float]] = {}

    @classmethod
    def of_last(cls, lengths: Tensor, n: int) -> Observer:
        """Of the last n entries of rows that begin at column 0 and have `lengths` `[R]`."""
        return cls(lengths[:, None] - n + torch.arange(n, device=lengths.device))

    def keep(
        self, layer: int, query: Tensor, key: Tensor, *, mask: Tensor | None, scale: float
    ) -> None:
        """Keep what a layer asks with, `[R, Hq, T, D]`, and the scale of its scores."""
        index = self._columns.to(query.device)[:, None, :, None]
        index = index.expand(-1, query.shape[1], -1, query.shape[3])
        self.queries[layer] = query.gather(2, index), scale


def evict(
    method: CacheMethod,
    layers: Sequence[WindowLayer],
    lengths: Tensor,
    observer: Observer,
    branches: int,
    begins: Tensor | None = None,
) -> tuple[int, int]:
    """Let every layer keep what a method chooses.

    Rows of one item under guidance that have equally long prompts keep the same entries, by the
    mean of their scores: the branches then go on from the same context.

    Args:
        method: chooses.
        layers: of the cache, which share a layout; they get others.
        lengths: `[R]` int64, entries of every row; branch-major.
        observer: what the layers asked with.
        branches: G, guidance branches.
        begins: `[R]` int64, the cache index that later passes count each row's first entry by; it
            stands at 0 all the same. None: 0.

    Returns:
        Entries that the first layer dropped, of those that there were; zeros where none was.

    Cost: a host synchronisation a layer.
    """
    layout = layers[0].layout
    if int(lengths.max()) <= method.budget:
        return 0, 0
    first = torch.zeros_like(lengths) if begins is None else begins
    per_item = lengths.view(branches, -1)
    is_paired = (per_item == per_item[:1]).all(0)[None, :, None, None]  # [1, B, 1, 1]
    shorter: dict[int, KVCacheLayout] = {}
    for index, layer in enumerate(layers):
        query, scale = observer.queries[index]
        keys, values = layer.visible()
        context = CachedLayer(index, len(layers), keys, values, lengths, query, scale)
        scores = method.score(context)  # [R, H, S]
        if branches > 1:
            each = scores.unflatten(0, (branches, -1))
            scores = torch.where(is_paired, each.mean(0, keepdim=True), each).flatten(0, 1)
        keep = method.select(scores, lengths)
        n_kept = (keep >= 0).sum(-1).amin(1)  # [R], alike in all heads
        room = keep.shape[-1]
        if room not in shorter:
            shorter[room] = layout.shorten(first + lengths - n_kept)
        layer.evict(keep[:, 0] if keep.shape[1] == 1 else keep, shorter[room])
    dropped = layers[0].layout.dropped
    assert dropped is not None
    return int((dropped - first).sum()), int(lengths.sum())
