"""A key/value cache in which a pass chooses, row by row, the cache indices it writes.

For window models a cache index is a position; for canvas models any number. Rolling back means
overwriting: nothing is cropped or moved. Memory for all indices is allocated at the first pass that
reads beyond the prompt, after its activations are freed. It is `[H, R S, D]`, what a head reads of
a row together, indexed as `[R S, H, D]` for one indexed copy a write; the model sees
`[R, H, S, D]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.errors import ShapeError
from mmaccel.kernels import dispatch
from mmaccel.kernels.compact import compact
from mmaccel.pipelines.hosts.layers.packing import PackedEntries

_STEPS = 8  # of how many entries the heads of a layer keep


class KVCacheLayout:
    """Which entries the rows of a store hold, and which of them the current pass writes and reads.

    All layers that hold entries at the same cache indices share one. In `select`, rows are those
    selected.

    Args:
        max_length: S, cache indices per row; the last one is scratch for surplus writes.
        reports_past_only: whether the cache's length leaves out the pass's own tokens, for models
            that compare it with a mask's.
        heads: n, of which each is a row here (row r's: r n to r n + n - 1), so that they hold
            different numbers of entries. 1: all heads of a row hold as many.
    """

    def __init__(
        self, rows: int, max_length: int, reports_past_only: bool = False, heads: int = 1
    ) -> None:
        self.max_rows = rows  # that the cache holds
        self.rows = rows  # of a full pass
        self.pass_rows = rows  # R, of the current pass: the first ones
        self.max_length = max_length
        self.visible_length = max_length  # cache indices per row that the current pass reads
        self.reported_length = max_length  # to the model
        self.heads = heads
        self._reports_past_only = reports_past_only
        # cache indices per row that have memory: what the first pass reads, then S; and one more,
        # which nothing uses: so no pass reads whole rows, for which compiled passes would be
        # compiled again
        self.allocated_length = 0
        self.selected_rows: Tensor | None = None  # [R] int64, of a pass inside `select`
        self.write_index: Tensor | None = None  # [R W] int64, flat, that the current pass writes
        self.indices: Tensor | None = None  # [R, W] int64, cache indices of the current pass
        # [R] int64, how many of a row's entries were evicted, all of them before those that passes
        # write from then on
        self.dropped: Tensor | None = None
        # [R] int64, how many of a row's first entries layers hold in fewer bits; those behind them
        # stand in a ring, all of whose memory is allocated, cache index n at n modulo its size
        self.packed: Tensor | None = None
        # [R, W] bool, which entries of the current pass read the group behind those in fewer bits
        self.reads_next: Tensor | None = None

    def to_index(self, positions: Tensor) -> Tensor:
        """Cache indices of entries at `positions` `[R, ...]`, of each head if heads are rows."""
        if self.dropped is None:
            return positions
        dropped = self.dropped
        if self.selected_rows is not None:
            dropped = dropped[self.selected_rows.to(dropped.device)]
        positions = self.repeat(positions)
        return positions - dropped.view(-1, *[1] * (positions.ndim - 1))

    def repeat(self, states: Tensor) -> Tensor:
        """What is known of rows `[R, ...]`, for each of their heads where these are rows here."""
        return states if self.heads == 1 else states.repeat_interleave(self.heads, 0)

    def shift(self, reads: Tensor) -> Tensor:
        """What entries read of the layer, `[R, 1 or W, visible length]` bool, of `reads`
        `[R, 1 or W, P]` by positions: all of an evicted row's, up to those that passes write next.
        """
        if self.dropped is None:
            return reads
        index = torch.arange(self.visible_length, device=reads.device) + self.dropped[:, None]
        is_inside = (index < reads.shape[-1])[:, None]
        index = index.clamp(max=reads.shape[-1] - 1)[:, None].expand(-1, reads.shape[1], -1)
        return reads.gather(2, index) & is_inside

    def shorten(self, dropped: Tensor, room: int | None = None, heads: int = 1) -> KVCacheLayout:
        """The layout of layers of which each row, of this layout's times `heads`, loses `dropped`
        `[R]` int64 entries and needs `room` indices at most (None: all that remain). Cost: a host
        synchronisation.
        """
        length = self.max_length - int(dropped.min())
        length = length if room is None else min(length, room)
        rows = self.max_rows * heads
        shorter = KVCacheLayout(rows, length, self._reports_past_only, heads)
        shorter.dropped = dropped
        return shorter

    def pack(self, packed: Tensor, room: int) -> None:
        """Hold the first `packed` `[R]` int64 entries in fewer bits, before a ring of `room`."""
        self.packed = packed
        self.allocated_length = room

    def list_rows(self, rows: Tensor) -> Tensor:
        """The numbers here of `rows` `[n]` int64 of the cache, those of all their heads."""
        if self.heads == 1:
            return rows
        head = torch.arange(self.heads, device=rows.device)
        return (rows[:, None] * self.heads + head).flatten()

    def keep(self, rows: Tensor) -> None:
        rows = self.list_rows(rows)
        self.rows = self.max_rows = len(rows)
        if self.dropped is not None:
            self.dropped = self.dropped[rows.to(self.dropped.device)]
        if self.packed is not None:
            self.packed = self.packed[rows.to(self.packed.device)]

    def allocate(self) -> None:
        self.allocated_length = self.max_length + 1

    def prepare(self, cache_indices: Tensor, visible_length: int) -> None:
        """Prepare a pass that writes at `[R, W]` int64; beyond the length it is the last index."""
        self.pass_rows = cache_indices.shape[0]
        self.indices = cache_indices
        self.visible_length = min(visible_length, self.max_length)
        n_unreported = cache_indices.shape[1] if self._reports_past_only else 0
        self.reported_length = self.visible_length - n_unreported
        if self.packed is None and self.visible_length >= self.allocated_length:
            is_first = self.allocated_length == 0
            self.allocated_length = (self.visible_length if is_first else self.max_length) + 1
        if self.selected_rows is None:
            rows = torch.arange(self.pass_rows, device=cache_indices.device)
        else:
            rows = self.selected_rows.to(cache_indices.device)
        length = self.allocated_length
        at = cache_indices.clamp(max=length - 2)
        if self.packed is not None:
            at = cache_indices.clamp(max=self.max_length - 1) % length
        self.write_index = (at + rows[:, None] * length).flatten()

    def choose_entries(self, entries: Tensor) -> None:
        """Let the prepared pass write some of its entries alone, `[T]` int64 numbers of the R W."""
        assert self.write_index is not None and self.indices is not None
        width = self.indices.shape[1]
        head = torch.arange(self.heads, device=entries.device)[:, None]
        row = entries // width * self.heads + head  # [n, T]
        at = (row * width + entries % width).flatten()
        self.write_index = self.write_index[at.to(self.write_index.device)]

    def add_row(self, row: int, first: int, last: int) -> KVCacheLayout:
        """Let the pass write a row's positions `first` to `last - 1`, too; returns its layout."""
        assert self.write_index is not None
        added = KVCacheLayout(1, self.max_length, self._reports_past_only)
        added.dropped = None if self.dropped is None else self.dropped[row : row + 1]
        added.allocated_length = self.allocated_length
        index = torch.arange(first, last, device=self.write_index.device)[None]
        added.prepare(added.to_index(index), min(last, self.visible_length))
        assert added.write_index is not None
        flat = added.write_index + row * self.allocated_length
        self.write_index = torch.cat([self.write_index, flat])
        return added

    @contextmanager
    def select(self, rows: Tensor) -> Iterator[None]:
        """Inside the block, passes are of these rows, `[n]` int64, in their order."""
        self.selected_rows = self.list_rows(rows)
        self.rows = len(self.selected_rows)
        try:
            yield
        finally:
            self.rows = self.max_rows
            self.selected_rows = None


@dataclass(frozen=True)
class Going:
    """Entries that a layer drops next."""

    entries: Tensor  # [R, 1 or H, S] bool, by their cache indices
    boundary: Tensor  # [R] int64, the position from which on queries do not see them


class WindowLayer:
    """Keys and values of one attention layer, as transformers' cache layers. A part of a layer
    holds some of its `heads` `[n]` int64, each as a row of one head.

    Memory: `rows * allocated length * heads * (key width + value width)` numbers.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False

    def __init__(self, layout: KVCacheLayout, heads: Tensor | None = None) -> None:
        self.layout = layout
        self.heads = heads
        self.keys: Tensor | None = None  # [R S, H, D]; None in a layer of parts
        self.values: Tensor | None = None
        self.parts: tuple[WindowLayer, ...] = ()  # where heads hold different numbers of entries
        self.packed: PackedEntries | None = None  # the first entries, in fewer bits
        self.going: Going | None = None  # what is dropped next
        self.is_initialized = False

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values `[R, H, W, D]`; returns `visible`, but parts what they wrote."""
        if self.parts:
            for part in self.parts:
                part.update(part.take_heads(key_states), part.take_heads(value_states))
            return key_states, value_states
        layout = self.layout
        rows, _, width, _ = key_states.shape
        index = layout.write_index
        if index is None or rows * width != index.shape[0]:
            raise ShapeError(
                f"window cache: expected keys of {layout.pass_rows} rows at the cache indices of "
                f"the pass, received {list(key_states.shape)}; run the model through the forward "
                "of its wrapper"
            )
        self.make_room(key_states, value_states)
        assert self.keys is not None and self.values is not None
        for store, states in ((self.keys, key_states), (self.values, value_states)):
            flat = states.transpose(1, 2).flatten(0, 1)  # [R * W, H, D]
            store.index_copy_(0, self.write_index(store.device), flat)
        return self.visible()

    def take_heads(self, states: Tensor) -> Tensor:
        """Of `[R, H, ...]` those of this part's heads, which are its rows: `[R n, 1, ...]`."""
        assert self.heads is not None
        return states[:, self.heads.to(states.device)].flatten(0, 1)[:, None]

    def join_heads(self, of_parts: Sequence[Tensor]) -> Tensor:
        """`[R, H, ...]` of what was computed of each part, `[R n, ...]`."""
        heads = torch.cat([part.heads for part in self.parts if part.heads is not None])
        by_row = [
            states.unflatten(0, (-1, part.layout.heads))
            for part, states in zip(self.parts, of_parts, strict=True)
        ]
        return torch.cat(by_row, 1)[:, heads.argsort().to(of_parts[0].device)]

    @property
    def has_room(self) -> bool:
        n_indices = self.layout.max_rows * self.layout.allocated_length
        return self.keys is not None and self.keys.shape[0] >= n_indices

    def make_room(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[N, H, D]` of all cache indices that have memory in the pass."""
        self.lazy_initialization(key_states, value_states)
        if not self.has_room:
            self.hold(*self.held())
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def write_index(self, device: torch.device) -> Tensor:
        """Flat indices `[R W]` int64 that the current pass writes."""
        index = self.layout.write_index
        assert index is not None
        return index if index.device == device else index.to(device)

    def visible(self) -> tuple[Tensor, Tensor]:
        """Views `[R, H, visible length, D]` that the pass reads; of packed entries, the rings."""
        layout = self.layout
        keys, values = self.held()
        if self.packed is not None:
            return keys, values
        rows: slice | Tensor = slice(layout.pass_rows)
        if layout.selected_rows is not None:
            rows = layout.selected_rows.to(keys.device)
        return keys[rows, :, : layout.visible_length], values[rows, :, : layout.visible_length]

    @property
    def is_changing(self) -> bool:
        """Whether the entries of the current pass may not all see the same of the store."""
        return self.going is not None or self.layout.reads_next is not None

    def change(
        self, mask: Tensor, key: Tensor, value: Tensor, position: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What entries at `position` `[R, W]` int64 see of a store that changes between two of
        them: a mask `[R, 1 or H, W, S]` of numbers that are added, keys and values, longer where a
        group is read twice.
        """
        if self.going is not None:
            entries = fit(self.going.entries, key.shape[2]).to(mask.device)
            boundary = self.going.boundary.to(mask.device)
            is_behind = self.layout.repeat(position).to(mask.device) >= boundary[:, None]
            hidden = entries[:, :, None] & is_behind[:, None, :, None]
            mask = mask.masked_fill(hidden, float("-inf"))
        if self.layout.reads_next is not None:
            assert self.packed is not None and self.layout.packed is not None
            return self.packed.extend(mask, key, value, self.layout.packed, self.layout.reads_next)
        return mask, key, value

    def held(self) -> tuple[Tensor, Tensor]:
        """Keys and values `[R, H, S, D]` that have memory, but for packed ones: views, or a copy of
        parts, whose heads have anything behind what they hold.
        """
        if self.parts:
            of_parts = [part.held() for part in self.parts]  # [R n, 1, S, D]
            size = max(keys.shape[2] for keys, _ in of_parts)
            joined = []
            for stored in zip(*of_parts, strict=True):
                padded = [pad(x[:, 0], (0, 0, 0, size - x.shape[2])) for x in stored]
                joined.append(self.join_heads(padded))
            return joined[0], joined[1]
        assert self.keys is not None and self.values is not None
        rows = self.layout.max_rows
        keys = self.keys.view(rows, -1, *self.keys.shape[1:])
        values = self.values.view(rows, -1, *self.values.shape[1:])
        return keys.transpose(1, 2), values.transpose(1, 2)

    def hold(self, keys: Tensor, values: Tensor) -> None:
        """Hold these `[R, H, S, D]` from the first cache index that has memory on, in a copy."""
        self.keys = _make_store(keys, self.layout.allocated_length)
        self.values = _make_store(values, self.layout.allocated_length)

    def count(self, ends: Tensor) -> Tensor:
        """`[R, 1 or H]` int64, entries that the heads hold before the positions `ends` `[R]`."""
        if not self.parts:
            return self.layout.to_index(ends)[:, None]
        return self.join_heads([part.layout.to_index(ends) for part in self.parts])

    def write_row(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Write keys and values `[H, n, D]` to the first cache indices of a row."""
        self.make_room(keys[None], values[None])
        for store, states in zip(self.held(), (keys, values), strict=True):
            store[row, :, : states.shape[1]] = states

    def hide(self, going: Going) -> None:
        """Let queries behind a boundary see some entries no more."""
        self.going = going
        for part in self.parts:
            boundary = part.layout.repeat(going.boundary)
            part.going = Going(part.take_heads(going.entries), boundary)

    def keep(self, rows: Tensor) -> None:
        for part in self.parts:
            part.keep(rows)
        rows = self.layout.list_rows(rows)
        if self.going is not None:
            entries = self.going.entries[rows.to(self.going.entries.device)]
            boundary = self.going.boundary[rows.to(self.going.boundary.device)]
            self.going = Going(entries, boundary)
        if self.keys is not None:
            keys, values = self.held()
            self.keys = _make_store(keys[rows.to(keys.device)], keys.shape[2])
            self.values = _make_store(values[rows.to(values.device)], values.shape[2])
        if self.packed is not None:
            self.packed.keep(rows)

    def evict(self, keep: Tensor, layout: KVCacheLayout) -> None:
        """Keep entries `[R, 1 or H, K]` int64 in new memory, ascending; shorter lists end in -1."""
        keys, values = self.held()
        layout.allocate()
        self.layout = layout
        self.hold(take(keys, keep), take(values, keep))

    def move(self, keep: Tensor) -> None:
        """Keep chosen entries, moved to the front, in the same memory; lists are as of `evict`."""
        for store in self.held():
            store.copy_(take(store, keep))

    def split(self, keep: Tensor, ends: Tensor, whole: KVCacheLayout, room: int | None) -> None:
        """Let each head keep entries `[R, H, K]` of its own, in parts of those that keep about
        equally many, in eighths of what the longest one keeps. Cost: host synchronisations, and a
        copy of what stays.

        Args:
            ends: `[R]` int64, positions of the entries that passes write next.
            whole: the layout of layers that hold everything.
            room: indices that heads need behind those of the longest in their part; None: all.
        """
        keys, values = self.held()
        counts = (keep >= 0).sum(-1)  # [R, H]
        most = counts.amax(0)
        step = ((most * _STEPS).float() / most.max()).ceil()
        parts = []
        for n_steps in step.unique().flip(0):
            heads = (step == n_steps).nonzero()[:, 0]
            dropped = (ends[:, None] - counts[:, heads].to(ends.device)).flatten()
            longest = int(most[heads].max())
            layout = whole.shorten(dropped, None if room is None else longest + room, len(heads))
            layout.allocate()
            part = WindowLayer(layout, heads)
            index = part.take_heads(keep)[..., :longest]
            part.hold(take(part.take_heads(keys), index), take(part.take_heads(values), index))
            parts.append(part)
        self.parts = tuple(parts)
        self.keys = self.values = None
        self.layout = whole

    @property
    def layouts(self) -> list[KVCacheLayout]:
        return [part.layout for part in self.parts] or [self.layout]

    def hold_ring(self, keys: Tensor, values: Tensor) -> None:
        """Hold the entries of `[R, H, S, D]` that are behind packed ones, in a ring."""
        assert self.layout.packed is not None
        room = self.layout.allocated_length
        packed = self.layout.packed[:, None]
        # of the `room` entries from the first that is not packed on, that of each place of the ring
        index = packed + (torch.arange(room, device=packed.device) - packed) % room
        self.hold(take(keys, index[:, None]), take(values, index[:, None]))

    def unpack(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[R, H, visible length, D]` of rings and what is packed before them."""
        assert self.packed is not None and self.layout.packed is not None
        return self.packed.join(keys, values, self.layout.packed, self.layout.visible_length)

    @property
    def n_bytes(self) -> int:
        n_packed = 0 if self.packed is None else self.packed.n_bytes
        n_whole = sum(store.nbytes for store in (self.keys, self.values) if store is not None)
        return n_packed + n_whole + sum(part.n_bytes for part in self.parts)

    @property
    def bytes_an_index(self) -> int:
        """Bytes of all heads at a cache index, as written; 0 before the first pass."""
        stores = [store for store in (self.keys, self.values) if store is not None]
        n_bytes = self.layout.heads * sum(store[:1].nbytes for store in stores)
        return n_bytes + sum(part.bytes_an_index for part in self.parts)

    def commit(self, start: Tensor, path: Tensor) -> None:
        """Move entries `path` `[R, D]` int64 (ascending; shorter ones end in -1) of the last pass,
        begun at `start` `[R]`, to its front.
        """
        for part in self.parts:
            part.commit(start, path)
        if self.parts:
            return
        assert self.keys is not None and self.values is not None
        start = self.layout.to_index(start).to(self.keys.device)
        path = self.layout.repeat(path).to(self.keys.device)
        keep = torch.where(path >= 0, start[:, None] + path, -1)
        for store in (self.keys, self.values):
            by_row = store.view(self.layout.max_rows, -1, *store.shape[1:])[: len(path)]
            dispatch.run(compact, by_row, keep, start)

    def clear(self) -> None:
        for part in self.parts:
            part.clear()
        for store in (self.keys, self.values):
            if store is not None:
                store.zero_()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if self.keys is None:
            room = self.layout.max_rows * self.layout.allocated_length
            heads = key_states.shape[1]
            self.keys = key_states.new_zeros(heads, room, key_states.shape[3]).transpose(0, 1)
            self.values = value_states.new_zeros(heads, room, value_states.shape[3]).transpose(0, 1)
            self.is_initialized = True

    def get_seq_length(self) -> int:
        return self.layout.reported_length

    def get_max_length(self) -> int:
        return self.layout.max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.layout.visible_length, 0


def make_cache(n_layers: int, layout: KVCacheLayout) -> Any:
    """A transformers `Cache(layers=...)` of empty window layers, transformers 5.17 to 5.24."""
    from transformers.cache_utils import Cache

    layers: list[Any] = [_layer_class()(layout) for _ in range(n_layers)]
    return Cache(layers=layers)


@cache
def _layer_class() -> type[WindowLayer]:
    """`WindowLayer` as a child of transformers' own: a `Cache` asks only those for their length."""
    from transformers.cache_utils import CacheLayerMixin

    return type("WindowCacheLayer", (WindowLayer, CacheLayerMixin), {})


def take(states: Tensor, index: Tensor) -> Tensor:
    """Entries `[R, H, K, D]` of `[R, H, S, D]` at `[R, 1 or H, K]`; beyond, any entry."""
    at = index.to(states.device).clamp(0, states.shape[2] - 1)[..., None]
    return states.gather(2, at.expand(-1, states.shape[1], -1, states.shape[3]))


def fit(known: Tensor, size: int) -> Tensor:
    """What is known `[R, H, S]` of the entries of a store, of `size` of them; 0 of those behind."""
    n_missing = size - known.shape[2]
    return pad(known, (0, n_missing)) if n_missing > 0 else known[..., :size]


def _make_store(states: Tensor, room: int) -> Tensor:
    """A store `[R room, H, D]` that begins with states `[R, H, S, D]`, row by row."""
    rows, heads, length, width = states.shape
    # zeros: an index that was never written is masked, but NaN would come through a mask
    memory = states.new_zeros(heads, rows, room, width)
    memory[:, :, :length] = states.transpose(0, 1)[:, :, :room]
    return memory.flatten(1, 2).transpose(0, 1)


def number_served(windows: Sequence[int | None]) -> dict[int, int]:
    """The layers that methods serve, those without a sliding window, as methods count them."""
    served = [layer for layer, window in enumerate(windows) if window is None]
    return {layer: number for number, layer in enumerate(served)}
