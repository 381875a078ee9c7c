"""Eviction carried out: what a method looks at of a prompt, and the entries that stay.

While the prompt is processed an `Observer` keeps the queries of each row's last entries, and adds
up the attention of all where a method wants it. When the prompt is in the cache, `evict` asks the
method layer by layer, moves what stays together and frees the rest. Position and cache index differ
from then on, by as many entries as a row lost in a layer; the layer's `KVCacheLayout` alone knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.checks import check_answer
from mmaccel.kernels import dispatch
from mmaccel.kernels.column_mass import column_mass
from mmaccel.kernels.window_attention import window_attention
from mmaccel.pipelines.layers.head_parts import split_heads
from mmaccel.pipelines.layers.store import KVCacheLayout, WindowLayer
from mmaccel.reduction.kv_cache.contract import CachedLayer, CacheMethod

_PIECE = 64  # queries whose attention is added up at a time


@dataclass(frozen=True)
class Observed:
    """What was seen of a layer; see `CachedLayer`."""

    queries: Tensor
    scale: float
    total: Tensor | None
    rated: Tensor | None = None
    turn: Callable[[Tensor, Tensor], Tensor] | None = None

    def take(self, keep: Tensor) -> Observed:
        """With what is known of these entries `[R, 1 or H, K]`, of which negative ones are none."""
        return replace(self, total=_take(self.total, keep), rated=_take(self.rated, keep))

    def fill(self, size: int) -> Observed:
        """With what is known of `size` entries; see `fill`."""
        return replace(self, total=fill(self.total, size), rated=fill(self.rated, size))

    def keep(self, rows: Tensor) -> Observed:
        """Of these rows alone, `[n]` int64."""
        total = None if self.total is None else self.total[rows]
        rated = None if self.rated is None else self.rated[rows]
        return replace(self, queries=self.queries[rows], total=total, rated=rated)


def _take(known: Tensor | None, keep: Tensor) -> Tensor | None:
    if known is None:
        return None
    keep = keep.expand(-1, known.shape[1], -1)
    return known.gather(2, keep.clamp(min=0)).where(keep >= 0, 0)


class Observer:
    """A `Watcher` that keeps what a method looks at of a prompt, by layer.

    Args:
        method: looks.
        lengths: `[R]` int64, entries of each row.
        columns: `[R, T]` int64, columns of a row's entries in the prompt's pass, in order, and
            behind them those of padding. None: a row's entries are in its first columns, and the
            prompt may come in parts (`begin`).

    Attributes:
        lengths: see above.
        layers: what was seen, by number.
    """

    def __init__(self, method: CacheMethod, lengths: Tensor, columns: Tensor | None = None) -> None:
        self._method = method
        self.lengths = lengths
        self._columns = columns
        self._first = 0  # column of the first entry of the pass
        self._end: int | None = None  # that behind its last one; None: the pass has all columns
        index = torch.arange(method.observed, device=lengths.device)
        last = (lengths[:, None] - method.observed + index).clamp(min=0)
        self._last = last if columns is None else columns.gather(1, last)
        self.layers: dict[int, Observed] = {}

    @property
    def reads_hidden(self) -> bool:
        """See `Watcher`."""
        return self._method.reads_hidden

    def begin(self, width: int) -> None:
        """The next pass has the next `width` columns of the prompt, and surplus behind them."""
        self._first = 0 if self._end is None else self._end
        self._end = self._first + width

    def keep(
        self, layer: int, query: Tensor, key: Tensor, *,
        mask: Tensor | None, scale: float, hidden: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Keep what a layer asks with; see `Watcher.keep`."""
        column = self._last.to(query.device) - self._first
        index = column.clamp(0, query.shape[2] - 1)[:, None, :, None]
        index = index.expand(-1, query.shape[1], -1, query.shape[3])
        queries = query.gather(2, index)
        total = self._add_up(query, key, mask, scale) if self._method.accumulates else None
        rated = self._rate(layer, hidden, key) if self._method.reads_hidden else None
        if self._first:  # of entries before this part
            before = self.layers[layer]
            queries = torch.where((column >= 0)[:, None, :, None], queries, before.queries)
            if total is not None and before.total is not None:
                total = total + pad(before.total, (0, total.shape[2] - before.total.shape[2]))
            if rated is not None and before.rated is not None:
                rated = torch.cat([before.rated, rated], 2)
        self.layers[layer] = Observed(queries, scale, total, rated)

    def _rate(self, layer: int, hidden: Tensor | None, key: Tensor) -> Tensor:
        """What a method says `[R, H, T]` of the entries of the pass, without surplus."""
        assert hidden is not None
        rated = self._method.rate(layer, hidden)
        shape = (*key.shape[:2], hidden.shape[1])
        check_answer(f"{self._method.name}.rate", rated, shape, "float")
        if self._end is not None:
            rated = rated[:, :, : self._end - self._first]
        if self._columns is None:
            return rated
        columns = self._columns.to(rated.device)
        return rated.gather(2, columns[:, None].expand(-1, rated.shape[1], -1))

    def _add_up(self, query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """The attention `[R, Hkv, S]` that each entry receives from all entries."""
        device = query.device
        lengths = self.lengths.to(device)
        column = self._first + torch.arange(query.shape[2], device=device)
        is_own = column < lengths[:, None]  # [R, T]
        if self._end is not None:
            is_own = is_own & (column < self._end)
        counts = is_own.float()
        columns = None if self._columns is None else self._columns.to(device)
        if columns is not None:
            counts = torch.zeros_like(counts).scatter(1, columns, counts)
        key = key.to(query.dtype)
        total = query.new_zeros(key.shape[:3], dtype=torch.float32)
        for first in range(0, query.shape[2], _PIECE):
            piece = slice(first, first + _PIECE)
            asking = query[:, :, piece]
            weights = counts[:, piece]
            begin = self._first + first
            if mask is not None:
                total += _mass_under(mask[:, :, piece], asking, key, weights, scale)
            elif dispatch.uses_triton(device.type):
                start = torch.full_like(lengths, begin)
                _, lse = dispatch.run(window_attention, asking, key, key, start, scale=scale)
                total += dispatch.run(
                    column_mass, asking, key, lse, start, scale=scale, weights=weights
                )
            else:
                end = begin + asking.shape[2]  # behind it these queries see nothing
                index = torch.arange(end, device=device)
                seen = (index <= index[begin:, None])[None, None]
                total[..., :end] += _mass_under(seen, asking, key[:, :, :end], weights, scale)
        if columns is None:
            return total
        return total.gather(2, columns[:, None].expand_as(total))


class RepeatedPrompt:
    """A `Watcher` that looks at a prompt which is fed a second time behind itself, in pieces.

    Args:
        observer: of the prompt; its totals become the most attention that each entry receives from
            one of the repetition.
        lengths: `[R]` int64, entries of each row.
    """

    reads_hidden: ClassVar[bool] = False

    def __init__(self, observer: Observer, lengths: Tensor) -> None:
        self._observer = observer
        self._lengths = lengths
        self._first = 0

    def begin(self, first: int) -> None:
        """The next pass is of the entries from `first` on."""
        self._first = first

    def keep(
        self, layer: int, query: Tensor, key: Tensor, *,
        mask: Tensor | None, scale: float, hidden: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Look at what a layer asks with; see `Watcher.keep`."""
        seen = self._observer.layers[layer]
        longest = int(self._lengths.max())
        total = seen.total
        if total is None:
            total = query.new_zeros(*key.shape[:2], longest, dtype=torch.float32)
        heads = key.shape[1]
        lengths = self._lengths.to(query.device)
        index = torch.arange(key.shape[2], device=query.device)
        is_entry = (index[:longest] < lengths[:, None])[:, None]  # [R, 1, P]
        for first in range(0, query.shape[2], _PIECE):
            asking = query[:, :, first : first + _PIECE]
            entry = first + torch.arange(asking.shape[2], device=query.device)
            later = index > (lengths[:, None] + entry)[..., None]  # [R, n, S]
            packed = asking.unflatten(1, (heads, -1))  # [R, H, G, n, D]
            scores = (packed @ key.to(packed.dtype)[:, :, None].mT).float() * scale
            weights = scores.masked_fill(later[:, None, None], float("-inf")).softmax(-1)
            counts = self._first + entry < lengths[:, None]  # [R, n]
            weights = weights[..., :longest].where(counts[:, None, None, :, None], 0)
            total = total.maximum(weights.amax((2, 3)).where(is_entry, 0))
        self._observer.layers[layer] = replace(seen, total=total)


def _mass_under(mask: Tensor, query: Tensor, key: Tensor, weights: Tensor, scale: float) -> Tensor:
    """As `column_mass`, under a mask `[R, 1, W, S]` of bools, or of numbers that are added."""
    packed = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)  # [R, Hkv, G W, D]
    scores = (packed @ key.mT).float().mul_(scale)
    groups = query.shape[1] // key.shape[1]
    mask = mask.repeat(1, 1, groups, 1)
    if mask.dtype == torch.bool:
        scores.masked_fill_(~mask, float("-inf"))
    else:
        scores += mask
    counts = weights.repeat(1, groups)[:, None, None]  # [R, 1, 1, G W]
    attention = scores.softmax(-1)
    attention.masked_fill_(counts.mT == 0, 0)  # queries that see nothing are NaN
    return (counts @ attention).squeeze(2)


@dataclass(frozen=True)
class Eviction:
    """What an eviction has done.

    Attributes:
        n_dropped: entries that a layer dropped in the mean of layers and heads, rounded up.
        n_entries: entries that there were, over all rows of a layer.
        kept: of each layer, `[R, 1 or H, K]` int64, entries that stayed; empty where all did.
    """

    n_dropped: int
    n_entries: int
    kept: tuple[Tensor, ...] = ()


def evict(
    method: CacheMethod,
    layers: Sequence[WindowLayer],
    lengths: Tensor,
    observer: Observer,
    branches: int,
    begins: Tensor | None = None,
) -> Eviction:
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

    Cost: a host synchronisation a layer.
    """
    layout = layers[0].layout
    if int(lengths.max()) <= method.budget and method.every is None:
        return Eviction(0, 0)
    first = torch.zeros_like(lengths) if begins is None else begins
    is_paired = find_pairs(lengths, branches)
    shorter: dict[tuple[int, ...], KVCacheLayout] = {}
    kept: list[Tensor] = []
    n_kept_in_all = 0.0
    stays = None
    if method.pools_layers:
        scores = [
            method.ask("score", look(observer.layers[index], layer, index, len(layers), lengths))
            for index, layer in enumerate(layers)
        ]
        joined = [join_branches(one, is_paired) for one in scores]
        stays = method.share_out(torch.stack(joined, 1), lengths)
    for index, layer in enumerate(layers):
        seen = observer.layers[index]
        context = look(seen, layer, index, len(layers), lengths)
        if stays is not None:
            context = replace(context, stays=stays[:, index])
        if method.remembers:
            context = replace(context, total=method.ask("remember", context))
            observer.layers[index] = replace(seen, total=context.total)
        if index % method.shared_layers == 0:
            keep = choose(method, context, is_paired)
        kept.append(keep)
        if method.is_headwise:
            # until the second round begins, and a window that reaches into it
            n_next = None if method.every is None else 2 * method.every
            n_stay = split_heads(
                layer, keep, lengths, first + lengths, surplus=method.repeated, n_next=n_next
            )
            n_kept_in_all += n_stay / keep.shape[1]
            continue
        n_kept = (keep >= 0).sum(-1).amin(1)  # [R], alike in all heads
        room = find_room(method, context, keep.shape[-1] + (method.every or 0))
        counts = (*n_kept.tolist(), room)
        if counts not in shorter:
            shorter[counts] = layout.shorten(first + lengths - n_kept, room)
        merged = method.merge(context, keep) if method.merges else None
        layer.evict(keep[:, 0] if keep.shape[1] == 1 else keep, shorter[counts])
        if merged is not None:
            _write(layer, *merged)
        n_kept_in_all += int(n_kept.sum())
    n_entries = int(lengths.sum())
    n_dropped = math.ceil(n_entries - n_kept_in_all / len(layers) - 1e-9)
    return Eviction(n_dropped, n_entries, tuple(kept))


def _write(layer: WindowLayer, keys: Tensor, values: Tensor) -> None:
    """Let the first K entries of a layer be others `[R, H, K, D]`; passes overwrite those that a
    shorter row lacks.
    """
    for held, made in zip(layer.held(), (keys, values), strict=True):
        held[:, :, : made.shape[2]].copy_(made)


def find_pairs(lengths: Tensor, branches: int) -> Tensor:
    """`[1, B, 1, 1]` bool, whether all rows of an item have `lengths` `[R]` alike."""
    per_item = lengths.view(branches, -1)
    return (per_item == per_item[:1]).all(0)[None, :, None, None]


def look(
    seen: Observed, layer: WindowLayer, index: int, depth: int, lengths: Tensor
) -> CachedLayer:
    """What a method may look at of a layer of which each row has `lengths` `[R]` entries."""
    keys, values = layer.held()
    size = keys.shape[2]
    return CachedLayer(
        index, depth, keys, values, lengths=lengths, queries=seen.queries, scale=seen.scale,
        total=fill(seen.total, size), rated=fill(seen.rated, size), turn=seen.turn,
    )  # fmt: skip


def fill(known: Tensor | None, size: int) -> Tensor | None:
    """What is known `[R, H, S]` of the entries of a store of `size` indices; 0 of the others."""
    return None if known is None else pad(known, (0, size - known.shape[2]))


def choose(method: CacheMethod, layer: CachedLayer, is_paired: Tensor) -> Tensor:
    """The entries `[R, 1 or H, K]` that a method keeps in a layer; see `CacheMethod.plan`.

    Args:
        is_paired: see `find_pairs`.
    """
    return method.plan(layer, join_branches(method.ask("score", layer), is_paired))


def join_branches(scores: Tensor, is_paired: Tensor) -> Tensor:
    """Scores `[R, H, S]`, those of rows that are paired in the mean; see `find_pairs`."""
    branches = len(scores) // is_paired.shape[1]
    if branches == 1:
        return scores
    each = scores.unflatten(0, (branches, -1))
    return torch.where(is_paired, each.mean(0, keepdim=True), each).flatten(0, 1)


def find_room(method: CacheMethod, layer: CachedLayer, n_next: int) -> int | None:
    """How many cache indices a layer needs from now on, however long its rows become; None where
    every new entry stays.

    Args:
        n_next: the most entries that a row has at the end of its round.
    """
    if method.every is None:
        return None
    endless = replace(layer, lengths=torch.full_like(layer.lengths, 2**40))
    most = max(int(method.count(endless).max()), method.budget)
    # what is dropped stays for a round, a pass is not wider than one, and the last is scratch
    return max(n_next, most + 2 * method.every) + method.every + 1
