"""A key/value cache whose rows are written at places of their own.

A place is a position for models in windows, and any number for canvases. A pass writes its keys
where they stand and reads a view. Room for all places is taken at the first pass that looks beyond
the prompt: the prompt's own activations are gone by then. Rolling back is writing over, so nothing
is cropped, concatenated or moved. Rows are laid out `[R, S, H, D]` in memory and shown to the model
as `[R, H, S, D]`: a pass then is one indexed copy of whole rows, for every number of rows and any
raggedness.

Masks of a pass: what each position of each row may look at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mmaccel.errors import ShapeError


class KVCacheLayout:
    """Where the keys of the current pass go, shared by all layers.

    Args:
        rows, room: see below.
        is_apart: whether the cache says of itself that it holds what is shown less the pass's own
            entries, as models expect that compare its length with a mask's.

    Attributes:
        rows: rows of a pass; fewer than `stored` while `only` lasts.
        stored: rows there is room for.
        shown: R, rows of the current pass: the first ones, or those of `only`.
        room: S, positions per row, the last one being scratch.
        span: positions that are shown to the model, at most `room`.
        told: positions the cache says that it holds.
        taken: positions there is room for yet: the first pass's span, then all.
        chosen: `[R]` int64, rows of the current pass where `only` names them.
        index: `[R * W]` int64, flat places of the pass's keys.
    """

    def __init__(self, rows: int, room: int, is_apart: bool = False) -> None:
        self.rows = self.stored = rows
        self.room, self._is_apart = room, is_apart
        self.chosen: Tensor | None = None
        self.shown, self.span, self.told = rows, room, room
        self.taken = 0
        self.index: Tensor | None = None

    def aim(self, positions: Tensor, span: int) -> None:
        """Prepare a pass writing `positions` `[R, W]` int64, in any order; the last place takes the
        surplus.
        """
        self.shown, self.span = positions.shape[0], min(span, self.room)
        self.told = self.span - positions.shape[1] * self._is_apart
        if self.span > self.taken:
            self.taken = self.room if self.taken else self.span
        rows = torch.arange(self.shown, device=positions.device)
        rows = rows if self.chosen is None else self.chosen.to(positions.device)
        self.index = (positions.clamp(max=self.taken - 1) + rows[:, None] * self.taken).flatten()

    @contextmanager
    def only(self, rows: Tensor) -> Iterator[None]:
        """Passes of some rows alone, `[n]` int64, in their order."""
        self.rows, self.chosen = len(rows), rows
        try:
            yield
        finally:
            self.rows, self.chosen = self.stored, None


class WindowLayer:
    """Keys and values of one attention layer, in the shape transformers asks a cache layer to have.

    What a cache takes is a child of it that is also one of transformers' (see `make_cache`).

    Memory: `rows * room * heads * (key width + value width)` numbers; see `KVCacheLayout.taken`.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False

    def __init__(self, placement: KVCacheLayout) -> None:
        self.placement = placement
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.is_initialized = False

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write `[R, H, W, D]` keys and values where the pass stands.

        Returns:
            Views `[R, H, span, D]` of all keys and values.

        Raises:
            ShapeError: if no pass was prepared for this shape.
        """
        place = self.placement
        rows, _, width, _ = key_states.shape
        if place.index is None or rows != place.shown or rows * width != place.index.shape[0]:
            raise ShapeError(
                f"window cache: expected keys of {place.shown} rows at the places of the pass, "
                f"received {list(key_states.shape)}; run the model through the forward of what "
                "wraps it"
            )
        self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if self.keys.shape[0] < place.stored * place.taken:
            self.keys, self.values = _grow(place, self.keys), _grow(place, self.values)
        return _write(place, self.keys, key_states), _write(place, self.values, value_states)

    def keep(self, rows: Tensor) -> None:
        """Hold these rows alone, `[n]` int64, in their order."""
        for name in ("keys", "values"):
            store = getattr(self, name)
            if store is not None:
                of_rows = store.view(self.placement.stored, -1, *store.shape[1:])
                setattr(self, name, of_rows[rows.to(store.device)].flatten(0, 1))

    def clear(self) -> None:
        """Forget all keys and values, in the same room."""
        for store in (self.keys, self.values):
            if store is not None:
                store.zero_()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take the room for keys and values of this shape, unless it was taken before."""
        if self.keys is None:
            self.keys = _make_room(self.placement, key_states)
            self.values = _make_room(self.placement, value_states)
            self.is_initialized = True

    def get_seq_length(self) -> int:
        """Positions the model is told of; see `KVCacheLayout.told`."""
        return self.placement.told

    def get_max_length(self) -> int:
        """Positions there is room for."""
        return self.placement.room

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys a mask has to cover."""
        return self.placement.span, 0


def make_cache(n_layers: int, placement: KVCacheLayout) -> Any:
    """A transformers `Cache` of `n_layers` empty window layers.

    Source: `transformers.cache_utils.Cache(layers=...)`, transformers 5.17 to 5.23.
    """
    from transformers.cache_utils import Cache

    layers: list[Any] = [_layer_class()(placement) for _ in range(n_layers)]
    return Cache(layers=layers)


@cache
def _layer_class() -> type[WindowLayer]:
    """`WindowLayer` as one of transformers' layers: a `Cache` asks no other kind for its length."""
    from transformers.cache_utils import CacheLayerMixin

    return type("WindowCacheLayer", (WindowLayer, CacheLayerMixin), {})


def _make_room(place: KVCacheLayout, states: Tensor) -> Tensor:
    heads, width = states.shape[1], states.shape[3]
    # zeros: a place that was never written is masked, but NaN would come through a mask
    return torch.zeros(
        place.stored * place.taken, heads, width, dtype=states.dtype, device=states.device
    )


def _grow(place: KVCacheLayout, store: Tensor) -> Tensor:
    """A store of `place.taken` positions that begins with another's."""
    old = store.view(place.stored, -1, *store.shape[1:])
    new = store.new_zeros(place.stored, place.taken, *store.shape[1:])
    new[:, : old.shape[1]] = old
    return new.flatten(0, 1)


def _write(place: KVCacheLayout, store: Tensor, states: Tensor) -> Tensor:
    assert place.index is not None
    index = place.index if place.index.device == store.device else place.index.to(store.device)
    store.index_copy_(0, index, states.transpose(1, 2).flatten(0, 1))  # [R * W, H, D]
    rows = store.view(place.stored, place.taken, *store.shape[1:])
    if place.chosen is not None:
        return rows[place.chosen.to(store.device), : place.span].transpose(1, 2)
    return rows[: place.shown, : place.span].transpose(1, 2)


def make_masks(
    positions: Tensor, rows: int, span: int, windows: Collection[int | None], dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """The masks of a pass, as transformers' decoders take them.

    Args:
        positions: `[R, W]` int64, where the tokens of the pass stand; `[1, W]` for all rows.
        rows: R.
        span: keys that are shown.
        windows: sliding window of every layer, in positions; None where a layer sees everything.
        dtype: of the model.

    Returns:
        `[R, 1, W, span]`, 0 where a key is seen and -inf elsewhere; a dictionary of these by
        transformers' name of the layer's kind, where layers differ.
    """
    kinds = set(windows)
    masks = {
        "full_attention" if window is None else "sliding_attention": _make_mask(
            positions, span, window, dtype
        ).expand(rows, -1, -1, -1)
        for window in kinds
    }
    return masks if len(kinds) > 1 else next(iter(masks.values()))


def _make_mask(positions: Tensor, span: int, window: int | None, dtype: torch.dtype) -> Tensor:
    keys = torch.arange(span, device=positions.device)[None, None, None]
    own = positions[:, None, :, None]
    hidden = keys > own  # [R, 1, W, span]
    if window is not None:
        hidden |= keys <= own - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(hidden, float("-inf"))


def mask_reads(reads: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The mask of entries that look at chosen places.

    Args:
        reads: `[R, 1, P]` or `[R, C, P]` bool.
        width: C.
        dtype: of the model.

    Returns:
        `[R, 1, C, P]`, 0 where a place is read and the lowest finite number elsewhere: an entry
        that reads nothing (nobody's) then has no NaN, which would come through others' masks.
    """
    mask = torch.zeros(reads.shape, dtype=dtype, device=reads.device)
    mask.masked_fill_(~reads, torch.finfo(dtype).min)
    return mask[:, None].expand(-1, -1, width, -1)
