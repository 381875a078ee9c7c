"""Eviction carried out: of prompts, and in rounds of n tokens while tokens are generated.

When a prompt is in the cache, the method is asked layer by layer; what stays is moved together, the
rest is freed. Position and cache index differ from then on by what a row, or a head of it, lost in
a layer; the layer's `KVCacheLayout` alone knows.

Round k of a row is decided when k n of its generated tokens are in the cache: the method looks at
the entries before that boundary, and at the queries of the last ones. What it drops is hidden from
entries n or more positions behind the boundary (`Going`), and freed when a pass begins there. So
what an entry attends to follows from its position and the accepted tokens alone; a window across a
boundary attends under a mask, and none is wider than n. Until then the cache holds the budget, two
rounds and a window. Queries are kept by position and overwritten as the cache is.

Where heads keep different numbers of entries, each is a row of one head to the method in rounds.

Where tensors are not read on the host, a round is the same operations in the same memory whether it
is due or not. It is enough that passes in between write n positions at most
(`Eviction.begin_pass`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from mmaccel.errors import OptionError
from mmaccel.pipelines.hosts.layers.observing import Observed, Observer
from mmaccel.pipelines.hosts.layers.store import Going, KVCacheLayout, WindowLayer, fit
from mmaccel.reduction.kv_cache.contract import CachedLayer, CacheMethod, list_entries

# those that layers have got, by the entries that rows keep and by what they have room for
Layouts: TypeAlias = dict[tuple[int, ...], KVCacheLayout]


class Eviction:
    """What a method evicts of the caches of one run; a `Watcher` of the passes behind prompts. Its
    `every` is n.

    Rows of one item under guidance with equally long prompts keep the same entries, by the mean of
    their scores. Heads of different lengths are always read on the host.
    """

    def __init__(
        self,
        method: CacheMethod,
        layers: Sequence[WindowLayer],
        branches: int = 1,
        reads_back: bool = True,
    ) -> None:
        self._reads_back = reads_back or method.is_headwise
        self._is_due = True  # whether the next pass carries out rounds
        self._n_ahead = 0  # entries of passes since one did
        self._most: dict[int, int] = {}  # by layer, entries that stay in a round
        self._counts: Tensor | None = None  # [2], entries, and those that heads have dropped
        self._n_heads = 1  # of a layer
        self._method = method
        self._layers = layers
        self._branches = branches
        self._whole = layers[0].layout
        self._every = method.every or 0
        self._is_paired = torch.ones(1, 1, 1, 1, dtype=torch.bool)  # [1, B, 1, 1], each item
        self._boundary: Tensor | None = None  # [R], of each row's next round
        n_read = max(method.observed, self._every if self._remembers else 0)
        self._size = n_read + self._every  # positions whose queries are kept
        self._seen: list[Observed] = []
        self._queries: list[Tensor] = []  # by layer, [R, Hq, size, D]; position modulo size
        self._rated: dict[int, Tensor] = {}  # by layer, [R, H, 2 n, 1]; position modulo 2 n

    @property
    def n_evicted(self) -> tuple[int, int]:
        """Entries that were dropped, of a layer in the mean, of those that were looked at, over all
        rows. Cost: a host synchronisation.
        """
        if self._counts is None:
            return 0, 0
        n_entries, n_dropped = self._counts.tolist()
        return -(-n_dropped // (self._n_heads * len(self._layers))), n_entries

    @property
    def is_repeated(self) -> bool:
        return self._boundary is not None

    @property
    def reads_hidden(self) -> bool:
        return self._method.reads_hidden

    def evict(
        self, lengths: Tensor, observer: Observer, begins: Tensor | None = None
    ) -> list[Tensor]:
        """Let every layer keep what the method chooses of the prompt. Cost: a host synchronisation
        a layer.

        Returns of each layer, `[R, 1 or H, K]` int64, the entries that stay; empty where all do.

        Args:
            lengths: `[R]` int64, entries of every row; branch-major.
            begins: `[R]` int64, the cache index that later passes count each row's first entry by;
                it stands at 0 all the same. None: 0.
        """
        method = self._method
        kept: list[Tensor] = []
        if int(lengths.max()) <= method.budget and method.every is None:
            return kept
        self._counts = torch.stack([lengths.sum(), torch.zeros_like(lengths[0])])
        self._n_heads = self._layers[0].held()[0].shape[1]
        per_item = lengths.view(self._branches, -1)
        self._is_paired = (per_item == per_item[:1]).all(0)[None, :, None, None]
        self._whole.max_length -= method.repeated  # what repeated a prompt is no longer needed
        ends = lengths if begins is None else lengths + begins
        if method.every is not None:
            self._boundary = lengths + method.every
            self._start = lengths  # [R], position of each row's first query of a pass
        self._seen = [observer.layers[index] for index in range(len(self._layers))]
        counts = lengths[:, None]
        stays = None
        if method.pools_layers:
            scores = [self._score(self._look(i, counts)) for i in range(len(self._layers))]
            stays = method.share_out(torch.stack(scores, 1), lengths)
        layouts: Layouts = {}
        for index, layer in enumerate(self._layers):
            context = self._look(index, counts)
            if stays is not None:
                context = replace(context, stays=stays[:, index])
            if method.remembers:
                context = replace(context, total=method.ask("remember", context))
                self._seen[index] = replace(self._seen[index], total=context.total)
            if index % method.shared_layers == 0:
                keep = method.plan(context, self._score(context))
            kept.append(keep)
            self._count(lengths[:, None] - (keep >= 0).sum(-1))
            merged = method.merge(context, keep) if method.merges else None
            self._drop(layer, context, keep, ends, layouts)
            if merged is not None:
                layer.hold(*merged)
        if method.every is None:
            self._seen = []
        else:
            self._begin_rounds(lengths, kept)
        return kept

    def _begin_rounds(self, lengths: Tensor, kept: Sequence[Tensor]) -> None:
        for index, seen in enumerate(self._seen):
            rows, heads, _, width = seen.queries.shape
            self._queries.append(seen.queries.new_zeros(rows, heads, self._size, width))
            _put(self._queries[index], seen.queries, lengths - self._method.observed)
            self._seen[index] = seen.look(kept[index])
            if not self._reads_back:  # memory that stays
                room = self._layers[index].held()[0].shape[2]
                self._seen[index] = self._seen[index].fit(room)
                chosen = kept[index - index % self._method.shared_layers]
                going = chosen.new_zeros(*chosen.shape[:2], room, dtype=torch.bool)
                assert self._boundary is not None
                self._layers[index].hide(Going(going, self._boundary))

    def begin_pass(self, width: int) -> bool:
        """Announce a pass; whether it carries out rounds, where that is not read on the host."""
        self._n_ahead += width
        self._is_due = self._n_ahead > self._every
        if self._is_due:
            self._n_ahead = width
        return self._is_due and not self._reads_back

    def advance(self, start: Tensor) -> None:
        """Carry out what is due before a pass that starts at `start` `[R]`; entries before are
        accepted. Cost: a host synchronisation, and in a round a copy of the cache.
        """
        self._start = start
        boundary = self._boundary
        assert boundary is not None and self._counts is not None
        due = start >= boundary
        is_due = bool(due.any()) if self._reads_back else self._is_due
        self._is_due = True  # a pass that nobody announces
        if not is_due:
            return
        self._counts[0].add_(self._every * due.sum())
        before = boundary.clone()
        boundary.add_(self._every * due)
        layouts: Layouts = {}
        dropped: dict[KVCacheLayout, Tensor] = {}
        for index in range(len(self._layers)):
            self._carry_out(index, start, due, layouts, dropped)
        for layout, numbers in dropped.items():  # which layers share
            assert layout.dropped is not None
            layout.dropped.copy_(numbers)
        for index, layer in enumerate(self._layers):
            if index % self._method.shared_layers == 0:
                going = self._decide(index, before, due)
            if self._reads_back:
                layer.hide(Going(going, boundary))
            else:
                assert layer.going is not None
                layer.going.entries.copy_(going)

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with these rows alone, `[n]` int64: items of all branches."""
        assert self._boundary is not None
        self._boundary = self._boundary[rows]
        self._is_paired = self._is_paired[:, rows[: len(rows) // self._branches]]
        self._queries = [queries[rows] for queries in self._queries]
        self._rated = {layer: rated[rows] for layer, rated in self._rated.items()}
        self._seen = [seen.keep(rows) for seen in self._seen]
        for layer in self._layers:  # whose boundary is this very tensor where nothing is read back
            if layer.going is not None:
                layer.hide(Going(layer.going.entries, self._boundary))

    def keep(
        self, layer: int, query: Tensor, key: Tensor, *,
        mask: Tensor | None, scale: float, hidden: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Keep what a pass asks with; raises OptionError for one that is wider than a round."""
        width = query.shape[2]
        if width > self._every:
            raise OptionError(
                f"{self._method.name}.every: expected at least the {width} entries of a pass, "
                f"received {self._every}; give a larger every or a narrower window"
            )
        _put(self._queries[layer], query, self._start)
        if not self.reads_hidden:
            return
        assert hidden is not None
        rated = self._method.rate(layer, hidden)[..., None]  # [R, H, W, 1]
        if layer not in self._rated:
            self._rated[layer] = rated.new_zeros(*rated.shape[:2], 2 * self._every, 1)
        _put(self._rated[layer], rated, self._start)

    @property
    def _remembers(self) -> bool:
        return self._method.accumulates or self._method.remembers

    def _look(self, index: int, counts: Tensor, queries: Tensor | None = None) -> CachedLayer:
        """What the method may look at of a layer before boundaries `counts` `[R, 1 or H]`; with one
        a head, each is a row of one head. `queries` are of the last entries; None: the prompt's.
        """
        keys, values = self._layers[index].held()
        seen = self._seen[index].fit(keys.shape[2])
        context = CachedLayer(
            index, len(self._layers), keys, values, lengths=counts[:, 0],
            queries=seen.queries if queries is None else queries, scale=seen.scale,
            total=seen.total, rated=seen.rated, turn=seen.turn, most=self._most.get(index),
        )  # fmt: skip
        if not self._layers[index].parts:
            return context
        return replace(
            context,
            keys=keys.flatten(0, 1)[:, None],
            values=values.flatten(0, 1)[:, None],
            lengths=counts.flatten(),
            queries=context.queries.unflatten(1, (keys.shape[1], -1)).flatten(0, 1),
            total=_to_heads(seen.total),
            rated=_to_heads(seen.rated),
        )

    def _score(self, context: CachedLayer) -> Tensor:
        """What the method says of entries, `[R, 1 or H, S]`; in paired rows the mean."""
        scores = self._method.ask("score", context)
        if self._branches == 1:
            return scores
        each = scores.view(self._branches, self._is_paired.shape[1], -1, scores.shape[2])
        joined = torch.where(self._is_paired, each.mean(0, keepdim=True), each)
        return joined.reshape(scores.shape)

    def _count(self, dropped: Tensor) -> None:
        assert self._counts is not None
        n_dropped = dropped.sum() * (self._n_heads // dropped.shape[1])  # of `[R, 1 or H]`
        self._counts[1].add_(n_dropped.to(self._counts.device))

    def _know(self, index: int, seen: Observed) -> None:
        if self._reads_back:
            self._seen[index] = seen
            return
        before = self._seen[index]  # in memory that graphs read
        for known, new in ((before.total, seen.total), (before.rated, seen.rated)):
            if known is not None and new is not None:
                known.copy_(new)

    def _find_size(self, index: int, counts: Tensor) -> int:
        """Entries that are looked at: the most of `counts` `[R, 1 or H]`, or all with memory."""
        if self._reads_back:
            return int(counts.max())
        return self._layers[index].held()[0].shape[2]

    def _drop(
        self, layer: WindowLayer, context: CachedLayer, keep: Tensor, ends: Tensor, layouts: Layouts
    ) -> None:
        """Let a layer keep entries `[R, 1 or H, K]` int64, ascending; shorter lists end in -1.
        `ends` `[R]` are the positions written next.
        """
        method = self._method
        counts = (keep >= 0).sum(-1)  # [R, 1 or H]
        n_kept = counts.amax(1)  # [R], alike in all heads unless the method is headwise
        room = None
        longest = 0  # that a row's list becomes
        if self._boundary is not None:
            n_next = self._boundary - ends  # [R], until the next round begins
            most = int((n_kept + n_next).max())
            if method.is_headwise:
                most = int(n_next.max())
            else:  # however long rows become: what is dropped stays for a round
                endless = replace(context, lengths=torch.full_like(context.lengths, 2**40))
                longest = int(method.count(endless).max())
                most = max(most, max(longest, method.budget) + 2 * self._every)
            room = most + self._every + 1  # a pass is not wider than a round; the last is scratch
        if method.is_headwise:
            if room is not None or bool((counts < context.lengths[:, None]).any()):
                layer.split(keep, ends, self._whole, room)
            return
        name = (room or 0, longest, *n_kept.tolist())
        if name not in layouts:
            layouts[name] = self._whole.shorten(ends - n_kept, room)
        layer.evict(keep, layouts[name])
        if not self._reads_back:
            longest = max(longest, method.budget)
            self._most[context.index] = min(longest, layer.layout.max_length)

    def _carry_out(
        self, index: int, start: Tensor, due: Tensor, layouts: Layouts,
        dropped: dict[KVCacheLayout, Tensor],
    ) -> None:  # fmt: skip
        """Free what a layer's rows were to drop, where due; where memory stays, `dropped` gets what
        its layout counts.
        """
        layer = self._layers[index]
        going = None if layer.going is None else layer.going.entries & due[:, None, None]
        if self._reads_back and not layer.parts and (going is None or not bool(going.any())):
            return
        counts = layer.count(start)  # [R, 1 or H], accepted entries
        size = self._find_size(index, counts)
        is_kept = torch.arange(size, device=counts.device) < counts[..., None]
        if going is not None:
            is_kept = is_kept & ~fit(going, size)
        n_kept = is_kept.sum(-1)  # [R, 1 or H]
        if self._reads_back:
            keep = list_entries(is_kept, int(n_kept.max()))
            self._drop(layer, self._look(index, counts), keep, start, layouts)
        else:
            keep = list_entries(is_kept, size)
            layer.move(keep)
            dropped[layer.layout] = start - n_kept[:, 0]
        self._know(index, self._seen[index].fit(size).look(keep))

    def _decide(self, index: int, boundary: Tensor, due: Tensor) -> Tensor:
        """What a layer's rows drop next, `[R, 1 or H, S]` bool, of entries before `boundary` `[R]`;
        rows that are not `due` `[R]` keep their choice.
        """
        method = self._method
        layer = self._layers[index]
        rows = due[:, None, None]
        counts = layer.count(boundary).where(due[:, None], 0)  # [R, 1 or H]
        shape = (len(due), -1)  # where a head is a row to the method: of its row
        if method.reads_hidden:
            self._take_rated(index, counts, boundary, due)
        if self._remembers:
            newest = _get(self._queries[index], boundary, self._every)
            context = self._look(index, counts, newest)
            assert context.total is not None
            total = torch.where(
                rows,
                method.ask("remember", context).reshape(*shape, context.keys.shape[2]),
                context.total.reshape(*shape, context.keys.shape[2]),
            )
            self._know(index, replace(self._seen[index], total=total))
        queries = _get(self._queries[index], boundary, method.observed)
        context = self._look(index, counts, queries)
        keep = method.plan(context, self._score(context))
        keep = keep.reshape(*shape, keep.shape[2])
        size = self._find_size(index, counts)
        is_kept = torch.zeros(*keep.shape[:2], size + 1, dtype=torch.bool, device=keep.device)
        is_kept.scatter_(2, keep.where(keep >= 0, size), True)
        is_entry = torch.arange(size, device=keep.device) < counts[..., None]
        going = ~is_kept[..., :size] & is_entry
        self._count(going.sum(-1))
        if layer.going is None:
            return going
        before = layer.going.entries
        longest = max(size, before.shape[2])
        return torch.where(rows, fit(going, longest), fit(before, longest))

    def _take_rated(self, index: int, counts: Tensor, boundary: Tensor, due: Tensor) -> None:
        newest = _get(self._rated[index], boundary, self._every)[..., 0]  # [R, H, n]
        known = self._seen[index].rated
        assert known is not None
        known = fit(known, max(self._find_size(index, counts), known.shape[2]))
        last = torch.arange(-self._every, 0, device=counts.device)
        entry = (counts[..., None] + last).clamp(min=0).expand_as(newest)
        put = known.scatter(2, entry.to(known.device), newest)
        rated = torch.where(due[:, None, None].to(known.device), put, known)
        self._know(index, replace(self._seen[index], rated=rated))


def _put(ring: Tensor, states: Tensor, first: Tensor) -> None:
    """Keep states `[R, H, n, D]` of the positions from `first` `[R]` on, modulo the ring's size."""
    position = first[:, None] + torch.arange(states.shape[2], device=first.device)
    at = (position % ring.shape[2]).to(states.device)[:, None, :, None]
    ring.scatter_(2, at.expand_as(states), states)


def _get(ring: Tensor, end: Tensor, n: int) -> Tensor:
    """The states `[R, H, n, D]` of the n positions before `end` `[R]`."""
    position = end[:, None] - n + torch.arange(n, device=end.device)
    at = (position % ring.shape[2]).to(ring.device)[:, None, :, None]
    return ring.gather(2, at.expand(-1, ring.shape[1], -1, ring.shape[3]))


def _to_heads(known: Tensor | None) -> Tensor | None:
    return None if known is None else known.flatten(0, 1)[:, None]  # [R H, 1, S]
