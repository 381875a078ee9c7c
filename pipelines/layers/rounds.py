"""Eviction that goes on while tokens are generated, in rounds of n tokens.

Round k of a row is decided when k n of its generated tokens are in the cache: the method looks at
the entries before that boundary, and at the queries of the last ones. What it drops is hidden from
entries that stand n positions behind the boundary or later, and is freed when a pass begins there.
So what an entry attends to follows from its position and the accepted tokens alone, whatever was
drafted: a window that reaches across a boundary attends under a mask, and no window is wider than
n. Until then the cache holds the budget, two rounds and a window.

Passes begin with `Rounds.advance`, which reads from `start` what was accepted. Queries are kept by
position and overwritten as the cache is, so that a rollback needs no work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.errors import OptionError
from mmaccel.pipelines.layers.eviction import (
    Observed,
    Observer,
    choose,
    fill,
    find_pairs,
    find_room,
    look,
)
from mmaccel.pipelines.layers.store import KVCacheLayout, WindowLayer
from mmaccel.reduction.kv_cache.contract import CachedLayer, CacheMethod

Layouts: TypeAlias = dict[tuple[int, ...], KVCacheLayout]
"""Those that layers of a round have got, by their old layout and the entries that rows keep."""


class Rounds:
    """The rounds of one run, whose prompt is in the cache and was evicted once.

    Args:
        method: chooses; its `every` is n.
        layers: of the cache.
        layout: of whole rows.
        lengths: `[R]` int64, entries of the prompt; branch-major.
        observer: what the prompt's layers asked with.
        kept: what stayed of each layer's prompt, see `Eviction`.
        branches: G, guidance branches.

    Attributes:
        n_dropped: entries that rounds have dropped, over all rows, of a layer in the mean, rounded
            up.
        n_entries: entries of all rows that rounds have looked at.
    """

    def __init__(
        self,
        method: CacheMethod,
        layers: Sequence[WindowLayer],
        layout: KVCacheLayout,
        lengths: Tensor,
        *,
        observer: Observer,
        kept: Sequence[Tensor],
        branches: int,
    ) -> None:
        assert method.every is not None
        self.n_entries = int(lengths.sum())
        self._n_dropped = 0.0  # over all layers, in the mean of heads
        self._method = method
        self._layers = layers
        self._whole = layout
        self._every = method.every
        self._is_paired = find_pairs(lengths, branches)
        self._boundary = lengths + method.every  # [R], of each row's next round
        self._hidden: dict[int, Tensor] = {}  # by layer, [R, 1 or H, S] bool, to go next
        n_wanted = max(method.observed, self._every if _remembers(method) else 0)
        self._size = n_wanted + self._every  # positions whose queries are kept
        self._seen: list[Observed] = []
        self._queries: list[Tensor] = []  # by layer, [R, Hq, size, D]; position modulo size
        self._rated: dict[int, Tensor] = {}  # by layer, [R, H, 2 n]; position modulo 2 n
        for index, keep in enumerate(kept):
            seen = observer.layers[index]
            self._seen.append(seen.take(keep))
            rows, heads, _, width = seen.queries.shape
            self._queries.append(seen.queries.new_zeros(rows, heads, self._size, width))
            self._write(index, seen.queries, lengths - method.observed)

    @property
    def n_dropped(self) -> int:
        """See the class."""
        return math.ceil(self._n_dropped / len(self._layers) - 1e-9)

    @property
    def reads_hidden(self) -> bool:
        """See `WindowPass`."""
        return self._method.reads_hidden

    def advance(self, start: Tensor) -> None:
        """Carry out what has become due, before a pass.

        Args:
            start: `[R]` int64, position of each row's first query; those before are accepted.

        Cost: a host synchronisation, and in a round a copy of the cache.
        """
        due = start >= self._boundary
        if not bool(due.any()):
            return
        boundary = self._boundary
        self.n_entries += self._every * int(due.sum())
        self._boundary = torch.where(due, boundary + self._every, boundary)
        layouts: Layouts = {}
        for index, layer in enumerate(self._layers):
            self._carry_out(index, layer, start, due, layouts)
            first = index - index % self._method.shared_layers
            if first == index:
                self._decide(index, layer, boundary, due)
            else:
                self._hidden[index] = self._hidden[first]

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone, `[n]` int64, in their order; there are no branches."""
        self._boundary = self._boundary[rows]
        self._is_paired = self._is_paired[:, rows]
        self._hidden = {layer: hidden[rows] for layer, hidden in self._hidden.items()}
        self._queries = [queries[rows] for queries in self._queries]
        self._rated = {layer: rated[rows] for layer, rated in self._rated.items()}
        self._seen = [seen.keep(rows) for seen in self._seen]

    def record(
        self, layer: int, query: Tensor, start: Tensor, hidden: Tensor | None = None
    ) -> None:
        """Keep what a pass asks with.

        Args:
            layer: its number.
            query: `[R, Hq, W, D]`.
            start: `[R]` int64, position of each row's first query.
            hidden: see `WindowPass.attend`.

        Raises:
            OptionError: a pass that is wider than a round.
        """
        width = query.shape[2]
        if width > self._every:
            raise OptionError(
                f"{self._method.name}.every: expected at least the {width} entries of a pass, "
                f"received {self._every}; give a larger every or a narrower window"
            )
        self._write(layer, query, start)
        if not self.reads_hidden:
            return
        assert hidden is not None
        rated = self._method.rate(layer, hidden)  # [R, H, W]
        if layer not in self._rated:
            self._rated[layer] = rated.new_zeros(*rated.shape[:2], 2 * self._every)
        at = start[:, None] + torch.arange(width, device=start.device)
        at = (at % (2 * self._every)).to(rated.device)[:, None].expand_as(rated)
        self._rated[layer].scatter_(2, at, rated)

    def find_hidden(
        self, layer: int, start: Tensor, query: Tensor, key: Tensor, part: int = 0
    ) -> Tensor | None:
        """What a pass must not see of the store, `[R, 1 or Hkv, W, S]` bool; None: all is seen.

        Args:
            layer: its number.
            start: `[R]` int64, position of each row's first query.
            query: `[R, Hq, W, D]`.
            key: `[R, Hkv, S, D]`.
            part: number of the layer's part whose heads these are.
        """
        hidden = self._hidden.get(layer)
        return None if hidden is None else self._hide(hidden, start, query, key)

    def _hide(self, hidden: Tensor, start: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Hide entries `[R, 1 or Hkv, S]` bool from queries behind the boundary."""
        width = query.shape[2]
        position = start[:, None] + torch.arange(width, device=start.device)
        is_behind = (position >= self._boundary[:, None]).to(query.device)  # [R, W]
        n_seen = min(hidden.shape[2], key.shape[2])
        found = hidden[..., :n_seen].to(query.device)
        found = pad(found, (0, key.shape[2] - n_seen))
        return found[:, :, None] & is_behind[:, None, :, None]

    def _write(self, layer: int, query: Tensor, first: Tensor) -> None:
        """Keep queries `[R, Hq, n, D]` of the positions from `first` `[R]` on."""
        n = query.shape[2]
        position = first[:, None] + torch.arange(n, device=first.device)
        at = (position % self._size).to(query.device)[:, None, :, None].expand_as(query)
        self._queries[layer].scatter_(2, at, query)

    def _read(self, layer: int, end: Tensor, n: int) -> Tensor:
        """The queries `[R, Hq, n, D]` of the n positions before `end` `[R]`."""
        queries = self._queries[layer]
        position = end[:, None] - n + torch.arange(n, device=end.device)
        at = (position % self._size).to(queries.device)[:, None, :, None]
        return queries.gather(2, at.expand(-1, queries.shape[1], -1, queries.shape[3]))

    def _carry_out(
        self,
        index: int,
        layer: WindowLayer,
        start: Tensor,
        due: Tensor,
        layouts: Layouts,
    ) -> None:
        """Free what a layer's rows were to drop next, where that is due."""
        hidden = self._hidden.get(index)
        if hidden is None or not bool((hidden & due[:, None, None]).any()):
            return
        old = layer.layout
        size = layer.held()[0].shape[2]
        hidden = pad(hidden, (0, size - hidden.shape[2]))
        ends = old.to_index(start)[:, None, None]  # [R, 1, 1], accepted entries
        entry = torch.arange(size, device=hidden.device)
        is_kept = (entry < ends) & ~(hidden & due[:, None, None])
        n_kept = is_kept.sum(-1).amin(1)  # [R], alike in all heads
        most = int(n_kept.max())
        keep = entry.where(is_kept, size).sort(-1).values[..., :most]
        keep = keep.where(keep < size, -1)
        context = look(self._seen[index], layer, index, len(self._layers), n_kept)
        n_next = int((n_kept + self._boundary - start).max())
        room = find_room(self._method, context, n_next)
        assert room is not None
        name = (id(old), room, *n_kept.tolist())
        if name not in layouts:
            layouts[name] = self._whole.shorten(start - n_kept, room)
        layer.evict(keep[:, 0] if keep.shape[1] == 1 else keep, layouts[name])
        self._seen[index] = self._seen[index].fill(size).take(keep)

    def _decide(self, index: int, layer: WindowLayer, boundary: Tensor, due: Tensor) -> None:
        """Choose what a layer's rows drop next.

        Args:
            index: the layer's number.
            layer: its store.
            boundary: `[R]` int64, positions before which entries are looked at.
            due: `[R]` bool, the rows that choose; others keep their choice.
        """
        method = self._method
        rows = due[:, None, None]
        if method.reads_hidden:
            self._take_rated(index, layer, boundary, due)
        if _remembers(method):
            newest = self._read(index, boundary, self._every)
            context = self._look(index, layer, newest, boundary, due)
            assert context.total is not None
            total = self._to_rows(method.ask("remember", context))
            total = torch.where(rows, total, self._to_rows(context.total))
            self._seen[index] = replace(self._seen[index], total=total)
        asking = self._read(index, boundary, method.observed)
        keep = self._choose(self._look(index, layer, asking, boundary, due))
        lengths = self._count(layer, boundary, due)[..., None]  # [R, 1 or H, 1]
        size = int(lengths.max())
        is_kept = torch.zeros(*keep.shape[:2], size + 1, dtype=torch.bool, device=keep.device)
        is_kept.scatter_(2, keep.where(keep >= 0, size), True)
        entry = torch.arange(size, device=keep.device)
        hidden = ~is_kept[..., :size] & (entry < lengths)
        self._n_dropped += float(hidden.sum(-1).float().mean(1).sum())
        before = self._hidden.get(index)
        if before is not None:
            longest = max(size, before.shape[2])
            hidden = pad(hidden, (0, longest - size))
            before = pad(before, (0, longest - before.shape[2]))
            hidden = torch.where(rows, hidden, before)
        self._hidden[index] = hidden

    def _count(self, layer: WindowLayer, boundary: Tensor, due: Tensor) -> Tensor:
        """`[R, 1 or H]` int64, entries before the boundary; 0 in rows that are not due."""
        return layer.layout.to_index(boundary).where(due, 0)[:, None]

    def _look(
        self, index: int, layer: WindowLayer, queries: Tensor, boundary: Tensor, due: Tensor
    ) -> CachedLayer:
        """What the method may look at of a layer; rows that are not due have no entries."""
        seen = replace(self._seen[index], queries=queries)
        lengths = self._count(layer, boundary, due)[:, 0]
        return look(seen, layer, index, len(self._layers), lengths)

    def _to_rows(self, found: Tensor) -> Tensor:
        """`[R, 1 or H, S]` of what the method says of what it looked at."""
        return found

    def _choose(self, context: CachedLayer) -> Tensor:
        """The entries `[R, 1 or H, K]` that stay; see `choose`."""
        return choose(self._method, context, self._is_paired)

    def _take_rated(self, index: int, layer: WindowLayer, boundary: Tensor, due: Tensor) -> None:
        """Put what was said of the last round's entries behind that of those before."""
        counts = self._count(layer, boundary, due)  # [R, 1 or H]
        newest = self._rated[index]
        round_ = torch.arange(-self._every, 0, device=counts.device)
        position = boundary[:, None] + round_  # [R, n]
        at = (position % newest.shape[2]).to(newest.device)[:, None].expand(-1, newest.shape[1], -1)
        size = int(counts.max())
        known = self._seen[index].rated
        assert known is not None
        known = fill(known, max(size, known.shape[2]))
        assert known is not None
        entry = (counts[..., None] + round_).clamp(min=0).expand(-1, newest.shape[1], -1)
        put = known.scatter(2, entry.to(known.device), newest.gather(2, at))
        rated = torch.where(due[:, None, None].to(known.device), put, known)
        self._seen[index] = replace(self._seen[index], rated=rated)


def _remembers(method: CacheMethod) -> bool:
    """Whether a method is asked what it remembers of a round."""
    return method.accumulates or method.remembers
