"""Eviction carried out: what a method looks at of a prompt, and the entries that stay.

While the prompt is processed an `Observer` keeps the queries of each row's last entries, and adds
up the attention of all where a method wants it. When the prompt is in the cache, `evict` asks the
method layer by layer, moves what stays together and frees the rest. Position and cache index differ
from then on, by as many entries as a row lost in a layer; the layer's `KVCacheLayout` alone knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.kernels import dispatch
from mmaccel.kernels.column_mass import column_mass
from mmaccel.kernels.window_attention import window_attention
from mmaccel.pipelines.layers.store import KVCacheLayout, WindowLayer
from mmaccel.reduction.kv_cache.contract import CachedLayer, CacheMethod

_PIECE = 64  # queries whose attention is added up at a time


@dataclass(frozen=True)
class Observed:
    """What was seen of a layer; see `CachedLayer`."""

    queries: Tensor
    scale: float
    total: Tensor | None


class Observer:
    """A `Watcher` that keeps what a method looks at of a prompt, by layer.

    Args:
        method: looks.
        lengths: `[R]` int64, entries of each row.
        columns: `[R, T]` int64, columns of a row's entries in the prompt's pass, in order, and
            behind them those of padding. None: a row's entries are in its first columns.
    """

    def __init__(self, method: CacheMethod, lengths: Tensor, columns: Tensor | None = None) -> None:
        self._accumulates = method.accumulates
        self._lengths = lengths
        self._columns = columns
        index = torch.arange(method.observed, device=lengths.device)
        last = (lengths[:, None] - method.observed + index).clamp(min=0)
        self._last = last if columns is None else columns.gather(1, last)
        self.layers: dict[int, Observed] = {}

    def keep(
        self, layer: int, query: Tensor, key: Tensor, *, mask: Tensor | None, scale: float
    ) -> None:
        """Keep what a layer asks with; see `Watcher.keep`."""
        index = self._last.to(query.device)[:, None, :, None]
        index = index.expand(-1, query.shape[1], -1, query.shape[3])
        total = self._add_up(query, key, mask, scale) if self._accumulates else None
        self.layers[layer] = Observed(query.gather(2, index), scale, total)

    def _add_up(self, query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """The attention `[R, Hkv, S]` that each entry receives from all entries."""
        device = query.device
        lengths = self._lengths.to(device)
        index = torch.arange(query.shape[2], device=device)
        counts = (index < lengths[:, None]).float()  # [R, T], of columns
        columns = None if self._columns is None else self._columns.to(device)
        if columns is not None:
            counts = torch.zeros_like(counts).scatter(1, columns, counts)
        key = key.to(query.dtype)
        total = query.new_zeros(key.shape[:3], dtype=torch.float32)
        for first in range(0, query.shape[2], _PIECE):
            piece = slice(first, first + _PIECE)
            asking = query[:, :, piece]
            weights = counts[:, piece]
            if mask is None:
                start = torch.full_like(lengths, first)
                _, lse = dispatch.run(
                    window_attention, asking, key, key, start, scale=scale, lse=True
                )
                total += dispatch.run(
                    column_mass, asking, key, lse, start, scale=scale, weights=weights
                )
            else:
                total += _mass_under(mask[:, :, piece], asking, key, weights, scale)
        if columns is None:
            return total
        return total.gather(2, columns[:, None].expand_as(total))


def _mass_under(mask: Tensor, query: Tensor, key: Tensor, weights: Tensor, scale: float) -> Tensor:
    """As `column_mass`, under a mask `[R, 1, W, S]` of bools, or of numbers that are added."""
    packed = query.unflatten(1, (key.shape[1], -1))  # [R, Hkv, G, W, D]
    scores = (packed @ key[:, :, None].mT).float() * scale
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask[:, :, None], float("-inf"))
    else:
        scores = scores + mask[:, :, None]
    counts = weights[:, None, None, :, None]
    attention = scores.softmax(-1).where(counts > 0, 0)  # queries that see nothing are NaN
    return (attention * counts).sum((2, 3))


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
        Entries that a layer dropped in the mean, rounded up, of those that there were; zeros where
        none was.

    Cost: a host synchronisation a layer.
    """
    layout = layers[0].layout
    if int(lengths.max()) <= method.budget:
        return 0, 0
    first = torch.zeros_like(lengths) if begins is None else begins
    per_item = lengths.view(branches, -1)
    is_paired = (per_item == per_item[:1]).all(0)[None, :, None, None]  # [1, B, 1, 1]
    shorter: dict[tuple[int, ...], KVCacheLayout] = {}
    n_dropped = 0
    for index, layer in enumerate(layers):
        if index % method.shared_layers == 0:
            keep = _choose(
                method, index, len(layers), layer, observer=observer, lengths=lengths,
                is_paired=is_paired,
            )  # fmt: skip
        n_kept = (keep >= 0).sum(-1).amin(1)  # [R], alike in all heads
        counts = tuple(n_kept.tolist())
        if counts not in shorter:
            shorter[counts] = layout.shorten(first + lengths - n_kept)
        layer.evict(keep[:, 0] if keep.shape[1] == 1 else keep, shorter[counts])
        n_dropped -= sum(counts)
    n_entries = int(lengths.sum())
    n_dropped += n_entries * len(layers)
    return -(-n_dropped // len(layers)), n_entries


def _choose(
    method: CacheMethod,
    index: int,
    depth: int,
    layer: WindowLayer,
    *,
    observer: Observer,
    lengths: Tensor,
    is_paired: Tensor,
) -> Tensor:
    """The entries `[R, 1 or H, K]` that a method keeps in a layer; see `CacheMethod.select`.

    Args:
        is_paired: `[1, B, 1, 1]` bool, whether the rows of an item keep the same.
    """
    seen = observer.layers[index]
    keys, values = layer.visible()
    total = seen.total
    if total is not None:  # of the columns that the prompt's pass read
        total = pad(total, (0, keys.shape[2] - total.shape[2]))
    context = CachedLayer(
        index, depth, keys, values, lengths=lengths, queries=seen.queries, scale=seen.scale,
        total=total,
    )  # fmt: skip
    scores = method.score(context)  # [R, H, S]
    branches = len(lengths) // is_paired.shape[1]
    if branches > 1:
        each = scores.unflatten(0, (branches, -1))
        scores = torch.where(is_paired, each.mean(0, keepdim=True), each).flatten(0, 1)
    return method.select(scores, lengths, method.count(context))
