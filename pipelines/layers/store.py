"""A key/value cache in which a pass chooses, row by row, the cache indices it writes.

For window models a cache index is a position; for canvas models it is any number. A pass writes its
keys and values at its cache indices and reads a view, so rolling back means overwriting: nothing is
cropped, concatenated or moved. Memory for all cache indices is allocated at the first pass that
reads beyond the prompt, after the prompt's activations are freed. A store is indexed as
`[R S, H, D]`, so that a write is one indexed copy, for any number of rows at any positions. Its
memory is `[H, R S, D]`: what a head reads of a row stands together, which the model sees as
`[R, H, S, D]`.

`make_masks` and `mask_reads` make the attention masks of a pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mmaccel.errors import ShapeError
from mmaccel.kernels import dispatch
from mmaccel.kernels.compact import compact
from mmaccel.pipelines.layers.packed_entries import PackedEntries, Workspace
from mmaccel.reduction.kv_cache.contract import CacheQuantizer

MASK_FORMS = ("additive", "bool", "zero-one")
"""Of the masks that models take: added to scores, True where something is seen, or 1 there."""


class KVCacheLayout:
    """Which cache indices the current pass writes and reads; all layers of a cache share it.

    Args:
        rows: rows the cache holds.
        max_length: S, cache indices per row; the last one is scratch for surplus writes.
        reports_past_only: whether the cache reports its length without the pass's own tokens, for
            models that compare that length with a mask's.

    Attributes:
        rows: rows of a full pass: all rows of the cache, or the selected ones inside `select`.
        max_rows: rows the cache holds.
        pass_rows: R, rows of the current pass: the first ones, or the selected ones.
        max_length: S, see above.
        allocated_length: cache indices per row that have memory: what the first pass reads, then
            S; and one more, which nothing uses: so no pass reads whole rows, for which compiled
            passes (`mmaccel.pipelines.runner.compiled_passes`) would be compiled again.
        visible_length: cache indices per row that the current pass reads, at most S.
        reported_length: length that the cache reports to the model.
        selected_rows: `[R]` int64, rows of a pass inside `select`; None outside.
        write_index: `[R * W]` int64, flat indices that the current pass writes.
        indices: `[R, W]` int64, the cache indices of the current pass.
        dropped: `[R]` int64, how many of a row's entries were evicted, all of them before those
            that passes write from then on; None: nothing was.
        packed: `[R]` int64, how many of a row's first entries layers hold in fewer bits: the
            memory of cache indices begins behind them, and is all allocated. None: nothing is.
    """

    def __init__(self, rows: int, max_length: int, reports_past_only: bool = False) -> None:
        self.rows = self.max_rows = self.pass_rows = rows
        self.max_length = self.visible_length = self.reported_length = max_length
        self._reports_past_only = reports_past_only
        self.allocated_length = 0
        self.selected_rows: Tensor | None = None
        self.write_index: Tensor | None = None
        self.indices: Tensor | None = None
        self.dropped: Tensor | None = None
        self.packed: Tensor | None = None

    def to_index(self, positions: Tensor) -> Tensor:
        """Cache indices `[R, ...]` of new entries that would stand at `positions` `[R, ...]` if
        nothing had been evicted.
        """
        if self.dropped is None:
            return positions
        dropped = self.dropped
        if self.selected_rows is not None:
            dropped = dropped[self.selected_rows.to(dropped.device)]
        return positions - dropped.view(-1, *[1] * (positions.ndim - 1))

    def shift(self, reads: Tensor) -> Tensor:
        """What entries read of the layer, `[R, 1 or W, visible length]` bool.

        Args:
            reads: `[R, 1 or W, P]` bool, cache indices that would be read if nothing had been
                evicted: all of an evicted row's, up to those that passes write from then on.
        """
        if self.dropped is None:
            return reads
        index = torch.arange(self.visible_length, device=reads.device) + self.dropped[:, None]
        is_inside = (index < reads.shape[-1])[:, None]
        index = index.clamp(max=reads.shape[-1] - 1)[:, None].expand(-1, reads.shape[1], -1)
        return reads.gather(2, index) & is_inside

    def shorten(self, dropped: Tensor, room: int | None = None) -> KVCacheLayout:
        """The layout of layers of which each row loses `dropped` `[R]` int64 entries.

        Args:
            room: cache indices that a row needs at most; None: all that are left.

        Cost: a host synchronisation.
        """
        length = self.max_length - int(dropped.min())
        length = length if room is None else min(length, room)
        shorter = KVCacheLayout(self.max_rows, length, self._reports_past_only)
        shorter.dropped = dropped
        return shorter

    def pack(self, packed: Tensor, room: int) -> KVCacheLayout:
        """The layout of layers that hold `packed` `[R]` int64 entries of each row in fewer bits.

        Args:
            packed: see above; the caller may raise the numbers in place.
            room: cache indices of each row behind them that have memory.
        """
        other = KVCacheLayout(self.max_rows, self.max_length, self._reports_past_only)
        other.dropped = self.dropped
        other.packed = packed
        other.allocated_length = room
        return other

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone, `[n]` int64, in their order."""
        self.rows = self.max_rows = len(rows)
        if self.dropped is not None:
            self.dropped = self.dropped[rows.to(self.dropped.device)]
        if self.packed is not None:
            self.packed = self.packed[rows.to(self.packed.device)]

    def allocate(self) -> None:
        """Let all cache indices have memory from the next write on."""
        self.allocated_length = self.max_length + 1

    def prepare(self, cache_indices: Tensor, visible_length: int) -> None:
        """Prepare a pass.

        Args:
            cache_indices: `[R, W]` int64 that the pass writes, in any order; indices beyond the
                allocated length write to the last one.
            visible_length: cache indices per row that the pass reads.
        """
        self.pass_rows = cache_indices.shape[0]
        self.indices = cache_indices
        self.visible_length = min(visible_length, self.max_length)
        n_own = cache_indices.shape[1] if self._reports_past_only else 0
        self.reported_length = self.visible_length - n_own
        if self.packed is None and self.visible_length >= self.allocated_length:
            is_first = self.allocated_length == 0
            self.allocated_length = (self.visible_length if is_first else self.max_length) + 1
        if self.selected_rows is None:
            rows = torch.arange(self.pass_rows, device=cache_indices.device)
        else:
            rows = self.selected_rows.to(cache_indices.device)
        length = self.allocated_length
        at = cache_indices
        if self.packed is not None:
            at = at - self.packed[rows.to(self.packed.device), None].to(at.device)
        self.write_index = (at.clamp(max=length - 2) + rows[:, None] * length).flatten()

    def add_row(self, row: int, first: int, last: int) -> KVCacheLayout:
        """Let the prepared pass write further entries of a row, behind its others: those that would
        stand from one cache index on, before another, if nothing had been evicted.

        Returns:
            The layout of a pass over these entries alone.
        """
        assert self.write_index is not None
        own = KVCacheLayout(1, self.max_length, self._reports_past_only)
        own.dropped = None if self.dropped is None else self.dropped[row : row + 1]
        own.allocated_length = self.allocated_length
        index = torch.arange(first, last, device=self.write_index.device)[None]
        own.prepare(own.to_index(index), min(last, self.visible_length))
        assert own.write_index is not None
        others = own.write_index + row * self.allocated_length
        self.write_index = torch.cat([self.write_index, others])
        return own

    @contextmanager
    def select(self, rows: Tensor) -> Iterator[None]:
        """Inside the block, passes are of these rows, `[n]` int64, in their order."""
        self.rows = len(rows)
        self.selected_rows = rows
        try:
            yield
        finally:
            self.rows = self.max_rows
            self.selected_rows = None


class WindowLayer:
    """Keys and values of one attention layer, with the interface of transformers' cache layers.

    Memory: `rows * allocated length * heads * (key width + value width)` numbers.

    Attributes:
        layout, keys, values: of all heads; the memory is None in a layer of parts.
        parts: where heads hold different numbers of entries, stores of some heads each.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False

    def __init__(self, layout: KVCacheLayout) -> None:
        self.layout = layout
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.parts: tuple[HeadPart, ...] = ()
        self.packed: PackedEntries | None = None
        self.is_initialized = False

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values `[R, H, W, D]` at the cache indices of the pass.

        Returns:
            Views `[R, H, visible length, D]` of all keys and values; of a layer of parts, what was
            given.

        Raises:
            ShapeError: no pass was prepared for this shape.
        """
        if self.parts:
            for part in self.parts:
                part.store.update(key_states[:, part.heads], value_states[:, part.heads])
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

    @property
    def n_bytes(self) -> int:
        """Of keys and values."""
        return sum(store.nbytes for store in (self.keys, self.values) if store is not None)

    @property
    def has_room(self) -> bool:
        """Whether there is memory for all that the pass writes and reads."""
        n_indices = self.layout.max_rows * self.layout.allocated_length
        return self.keys is not None and self.keys.shape[0] >= n_indices

    def make_room(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[N, H, D]` of all cache indices that have memory in this pass.

        Args:
            key_states, value_states: `[R, H, W, D]` of the pass, whose heads and dtype they take.
        """
        self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if not self.has_room:
            self.keys, self.values = _grow(self.layout, self.keys), _grow(self.layout, self.values)
        return self.keys, self.values

    def write_index(self, device: torch.device) -> Tensor:
        """`[R * W]` int64, flat indices that the current pass writes."""
        index = self.layout.write_index
        assert index is not None
        return index if index.device == device else index.to(device)

    def visible(self) -> tuple[Tensor, Tensor]:
        """Views `[R, H, visible length, D]` of what the current pass reads."""
        layout = self.layout
        assert self.keys is not None and self.values is not None
        if self.packed is None:
            return _view(layout, self.keys), _view(layout, self.values)
        assert layout.packed is not None
        keys, values = self.packed.join(*self.held(), layout.packed, layout.visible_length)
        return keys[: layout.pass_rows], values[: layout.pass_rows]

    def held(self) -> tuple[Tensor, Tensor]:
        """Views `[R, H, S, D]` of all keys and values that have memory; not of packed ones."""
        assert self.keys is not None and self.values is not None
        rows = self.layout.max_rows
        keys = self.keys.view(rows, -1, *self.keys.shape[1:])
        values = self.values.view(rows, -1, *self.values.shape[1:])
        return keys.transpose(1, 2), values.transpose(1, 2)

    def read(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H, N, D]` at cache indices `[B, N]` of the first B rows.

        Zeros at negative indices.
        """
        assert self.keys is not None and self.values is not None
        assert self.packed is None, "entries in fewer bits are read by passes alone"
        index = index.to(self.keys.device)
        rows = torch.arange(len(index), device=index.device)[:, None] * self.layout.allocated_length
        flat = (rows + index.clamp(min=0)).flatten()
        is_known = (index >= 0)[:, None, :, None]
        found = (store[flat].unflatten(0, index.shape) for store in (self.keys, self.values))
        keys, values = (states.transpose(1, 2).where(is_known, 0) for states in found)
        return keys, values

    def copy_row(self, row: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Copies of a row's keys and values `[H, n, D]` from one cache index on, before another."""
        keys, values = self.held()
        return keys[row, :, first:last].clone(), values[row, :, first:last].clone()

    def write_row(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Write keys and values `[H, n, D]` to the first cache indices of a row."""
        self.make_room(keys[None], values[None])
        for store, states in zip(self.held(), (keys, values), strict=True):
            store[row, :, : states.shape[1]] = states

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these, `[n]` int64, in their order."""
        for part in self.parts:
            part.keep(rows)
        for name in ("keys", "values"):
            store = getattr(self, name)
            if store is not None:
                by_row = store.view(self.layout.max_rows, -1, *store.shape[1:])
                setattr(self, name, _copy(by_row.transpose(1, 2)[rows.to(store.device)]))
        if self.packed is not None:
            self.packed.keep(rows)

    def evict(self, keep: Tensor, layout: KVCacheLayout) -> None:
        """Keep chosen entries, moved to the front, in memory of their own.

        Args:
            keep: `[R, K]` or `[R, H, K]` int64, cache indices in ascending order; shorter lists end
                in -1.
            layout: of the layer from now on; see `KVCacheLayout.shorten`.
        """
        assert self.keys is not None and self.values is not None
        layout.allocated_length = layout.max_length + 1
        self.keys = _move(self.layout, self.keys, keep, layout)
        self.values = _move(self.layout, self.values, keep, layout)
        self.layout = layout

    def take_heads(self, heads: Tensor) -> WindowLayer:
        """A store with a copy of some heads, `[n]` int64."""
        assert self.keys is not None and self.values is not None
        store = WindowLayer(self.layout)
        store.keys = self.keys[:, heads]
        store.values = self.values[:, heads]
        return store

    def split(self, parts: Sequence[HeadPart]) -> None:
        """Hold stores of some heads each from now on; see `mmaccel.pipelines.layers.head_parts`."""
        self.parts = tuple(parts)
        self.keys = self.values = None
        self.layout = parts[0].store.layout

    def join(self, keys: Tensor, values: Tensor, layout: KVCacheLayout) -> None:
        """Hold all heads together again: keys and values `[R, H, S, D]`, in a copy."""
        self.keys = _copy(keys)
        self.values = _copy(values)
        self.parts = ()
        self.layout = layout

    @property
    def layouts(self) -> list[KVCacheLayout]:
        """Its layout, or those of its parts."""
        return [part.store.layout for part in self.parts] or [self.layout]

    def pack(self, quantizer: CacheQuantizer, layout: KVCacheLayout, workspace: Workspace) -> None:
        """Hold the first entries of each row in fewer bits.

        Args:
            quantizer: packs them.
            layout: of the layer from now on; see `KVCacheLayout.pack`.
        """
        assert layout.packed is not None
        keys, values = self.held()
        n_packed = int(layout.packed.max())
        self.packed = PackedEntries(
            quantizer, keys[:, :, :n_packed], values[:, :, :n_packed], workspace
        )
        self._move_up(layout.packed, layout.allocated_length)
        self.layout = layout

    def pack_next(self, due: Tensor) -> None:
        """Hold one group more in fewer bits.

        Args:
            due: `[R]` bool, the rows that do; the caller counts it in their layout afterwards.
        """
        assert self.packed is not None and self.layout.packed is not None
        self.packed.append(*self.held(), self.layout.packed, due)
        n_moved = torch.where(due, self.packed.quantizer.group, 0)
        self._move_up(n_moved, self.layout.allocated_length)

    def _move_up(self, first: Tensor, room: int) -> None:
        """Let memory of `room` entries a row begin with what stands at `first` `[R]`."""
        keys, values = self.held()
        at = first.to(keys.device)[:, None] + torch.arange(room, device=keys.device)
        index = at.clamp(max=keys.shape[2] - 1)[:, None, :, None]  # [R, 1, room, 1]
        self.keys = _copy(keys.gather(2, index.expand(-1, keys.shape[1], -1, keys.shape[3])))
        self.values = _copy(
            values.gather(2, index.expand(-1, values.shape[1], -1, values.shape[3]))
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values, as they are allocated."""
        if self.parts:
            return sum(part.store.nbytes for part in self.parts)
        assert self.keys is not None and self.values is not None
        n_packed = 0 if self.packed is None else self.packed.nbytes
        return self.keys.nbytes + self.values.nbytes + n_packed

    @property
    def bytes_an_index(self) -> int:
        """Bytes of all heads' keys and values at a cache index, as they were written; 0 before the
        first pass.
        """
        if self.parts:
            return sum(part.store.bytes_an_index for part in self.parts)
        return sum(store[:1].nbytes for store in (self.keys, self.values) if store is not None)

    def commit(self, start: Tensor, path: Tensor) -> None:
        """Move entries of the last pass to the front of what it wrote.

        Args:
            start: `[R]` int64, where it would have begun if nothing had been evicted.
            path: `[R, D]` int64, ascending entries of each row; shorter paths end in -1.
        """
        for part in self.parts:
            part.store.commit(start, path)
        if self.parts:
            return
        assert self.keys is not None and self.values is not None
        start = self.layout.to_index(start).to(self.keys.device)
        path = path.to(self.keys.device)
        keep = torch.where(path >= 0, start[:, None] + path, -1)
        for store in (self.keys, self.values):
            by_row = store.view(self.layout.max_rows, -1, *store.shape[1:])[: len(path)]
            dispatch.run(compact, by_row, keep, start)

    def clear(self) -> None:
        """Zero all keys and values, in the same memory."""
        for part in self.parts:
            part.store.clear()
        for store in (self.keys, self.values):
            if store is not None:
                store.zero_()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate keys and values of this shape at the first call."""
        if self.keys is None:
            self.keys = _allocate(self.layout, key_states)
            self.values = _allocate(self.layout, value_states)
            self.is_initialized = True

    def get_seq_length(self) -> int:
        """Length that the cache reports; see `KVCacheLayout.reported_length`."""
        return self.layout.reported_length

    def get_max_length(self) -> int:
        """Cache indices per row."""
        return self.layout.max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys a mask has to cover."""
        return self.layout.visible_length, 0


@dataclass
class HeadPart:
    """Some heads of a layer.

    Attributes:
        heads: `[n]` int64, their numbers.
        store: their keys and values.
        counts: `[R, n]` int64, entries that a head holds of those before what passes write; a row's
            others hold more, and what is between stays empty.
    """

    heads: Tensor
    store: WindowLayer
    counts: Tensor

    def find_empty(self, size: int) -> Tensor:
        """`[R, n, S]` bool, those of the first S indices that hold nothing in a head."""
        index = torch.arange(size, device=self.counts.device)
        ends = self.counts.amax(1)[:, None, None]
        return (index >= self.counts[..., None]) & (index < ends)

    def count(self, ends: Tensor) -> Tensor:
        """`[R, n]` int64, entries that each head holds before the positions `ends` `[R]`."""
        index = self.store.layout.to_index(ends).to(self.counts.device)
        return self.counts + (index - self.counts.amax(1))[:, None]

    def to_index(self, entry: Tensor) -> Tensor:
        """`[R, n, S]` int64, where the entries `[S]` of each head stand; they are numbered without
        what is empty.
        """
        n_empty = self.counts.amax(1, keepdim=True) - self.counts
        return torch.where(entry < self.counts[..., None], entry, entry + n_empty[..., None])

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these, `[n]` int64, in their order."""
        self.store.keep(rows)
        self.counts = self.counts[rows.to(self.counts.device)]


def make_cache(n_layers: int, layout: KVCacheLayout) -> Any:
    """A transformers `Cache` of `n_layers` empty window layers.

    Source: `transformers.cache_utils.Cache(layers=...)`, transformers 5.17 to 5.24.
    """
    from transformers.cache_utils import Cache

    layers: list[Any] = [_layer_class()(layout) for _ in range(n_layers)]
    return Cache(layers=layers)


@cache
def _layer_class() -> type[WindowLayer]:
    """`WindowLayer` as a child of transformers' own: a `Cache` asks only those for their length."""
    from transformers.cache_utils import CacheLayerMixin

    return type("WindowCacheLayer", (WindowLayer, CacheLayerMixin), {})


def _allocate(layout: KVCacheLayout, states: Tensor) -> Tensor:
    heads, width = states.shape[1], states.shape[3]
    return _make_store(states, layout.max_rows * layout.allocated_length, heads, width)


def _make_store(like: Tensor, n_indices: int, heads: int, width: int) -> Tensor:
    """`[N, H, D]` in memory `[H, N, D]`."""
    # zeros: an index that was never written is masked, but NaN would come through a mask
    return like.new_zeros(heads, n_indices, width).transpose(0, 1)


def _copy(states: Tensor) -> Tensor:
    """A store with the content `[R, H, S, D]`."""
    store = states.transpose(0, 1).contiguous()  # [H, R, S, D]
    return store.flatten(1, 2).transpose(0, 1)


def _grow(layout: KVCacheLayout, store: Tensor) -> Tensor:
    """A store of `layout.allocated_length` indices per row that begins with another's content."""
    old = store.view(layout.max_rows, -1, *store.shape[1:])
    new = _make_store(store, layout.max_rows * layout.allocated_length, *store.shape[1:])
    new.view(layout.max_rows, -1, *store.shape[1:])[:, : old.shape[1]] = old
    return new


def _move(layout: KVCacheLayout, store: Tensor, keep: Tensor, shorter: KVCacheLayout) -> Tensor:
    """A store of `shorter.allocated_length` entries per row that begins with chosen ones."""
    old = store.view(layout.max_rows, -1, *store.shape[1:])
    dispatch.run(compact, old, keep.to(store.device))
    new = _make_store(store, layout.max_rows * shorter.allocated_length, *store.shape[1:])
    n_kept = min(keep.shape[-1], shorter.allocated_length)
    new.view(layout.max_rows, -1, *store.shape[1:])[:, :n_kept] = old[:, :n_kept]
    return new


def _view(layout: KVCacheLayout, store: Tensor) -> Tensor:
    """A view of what the current pass reads of a store."""
    by_row = store.view(layout.max_rows, layout.allocated_length, *store.shape[1:])
    if layout.selected_rows is None:
        return by_row[: layout.pass_rows, : layout.visible_length].transpose(1, 2)
    rows = layout.selected_rows.to(store.device)
    return by_row[rows, : layout.visible_length].transpose(1, 2)


def number_served(windows: Sequence[int | None]) -> dict[int, int]:
    """The layers that methods serve, by number: those that see everything, as methods count them.

    Args:
        windows: sliding window of every layer; None where it sees everything.
    """
    served = [layer for layer, window in enumerate(windows) if window is None]
    return {layer: number for number, layer in enumerate(served)}


def make_masks(
    positions: Tensor,
    rows: int,
    visible_length: int,
    windows: Collection[int | None],
    dtype: torch.dtype,
) -> Tensor | dict[str, Tensor]:
    """The masks of a pass, as transformers' decoders take them.

    Args:
        positions: `[R, W]` int64, positions of the pass's tokens; `[1, W]` if all rows agree.
        rows: R.
        visible_length: keys that the pass reads.
        windows: sliding window of every layer, in positions; None where a layer sees everything.

    Returns:
        `[R, 1, W, visible length]`, 0 where a key is seen and -inf elsewhere. Where layers differ,
        a dictionary of these by transformers' name of the layer's kind.
    """
    kinds = set(windows)
    masks = {
        "full_attention" if window is None else "sliding_attention": make_mask(
            positions, visible_length, window, dtype
        ).expand(rows, -1, -1, -1)
        for window in kinds
    }
    return masks if len(kinds) > 1 else next(iter(masks.values()))


def make_mask(
    positions: Tensor, visible_length: int, window: int | None, dtype: torch.dtype
) -> Tensor:
    """`[R, 1, W, S]`: 0 where a query at a cache index sees a key, and -inf elsewhere."""
    keys = torch.arange(visible_length, device=positions.device)[None, None, None]
    own = positions[:, None, :, None]
    hidden = keys > own  # [R, 1, W, S]
    if window is not None:  # a surplus query, beyond all keys, sees the last ones: no NaN
        hidden |= keys <= own.clamp(max=visible_length - 1) - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(hidden, float("-inf"))


def mask_reads(reads: Tensor, indices: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """The mask of entries that attend to chosen cache indices.

    Args:
        reads: `[R, 1, P]` or `[R, W, P]` bool, cache indices that an entry attends to. One that
            reads nothing (padding) reads itself, so that it has no NaN, which would come through
            others' masks.
        indices: `[R, W]` int64, where the entries are written.
        form: one of `MASK_FORMS`.

    Returns:
        `[R, 1, W, P]`: bools, ones and zeros, or 0 where an index is read and the lowest finite
        number elsewhere.
    """
    is_blind = ~reads.any(-1, keepdim=True)
    own = torch.arange(reads.shape[-1], device=reads.device) == indices[..., None]
    seen = (reads | (is_blind & own))[:, None]  # [R, 1, W, P]
    if form == "bool":
        return seen
    if form == "zero-one":
        return seen.to(dtype)
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)
