"""Keys and values kept at places of their own, and passes of a model that read them.

A pass computes some entries of every row, writes their keys and values to any places, and looks at
any places, under a mask of its own; the model is called as it is, with explicit positions and a
prepared 4-D mask. Nothing is cropped, concatenated or moved between passes.

Source of the idea: the replaced positions of C. Wu et al., "Fast-dLLM", 2025, arXiv 2505.22618; of
the shape a cache is asked to have: `transformers.cache_utils`, transformers 5.17 to 5.23.

Departures: one store for all cache plans; the mask says what is read, never the store's length.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mmaccel.errors import ShapeError, UnsupportedModelError

FORMS = ("additive", "bool", "zero-one")
"""How a model takes a 4-D mask: added to scores, as booleans, or as 1 where it may look."""


class Places:
    """Where the entries of the current pass go, shared by all layers.

    Attributes:
        rows, room: of the store.
        width: entries per row of the pass.
        span: places shown to the model, from the first on.
        index: `[R * C]` int64, flat places of the pass's keys.
    """

    def __init__(self, rows: int, room: int) -> None:
        self.rows, self.room = rows, room
        self.width = self.span = 0
        self.index: Tensor | None = None

    def aim(self, places: Tensor, span: int) -> None:
        """Prepare a pass that writes `places` `[R, C]` int64 and is shown `span` places."""
        self.width, self.span = places.shape[1], span
        first = torch.arange(places.shape[0], device=places.device)[:, None] * self.room
        self.index = (places + first).flatten()


class StoreLayer:
    """Keys and values of one attention layer; what a cache takes is also one of transformers'.

    Memory: `rows * room * heads * (key width + value width)` numbers.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False

    def __init__(self, places: Places) -> None:
        self.places = places
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.is_initialized = False

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write `[R, H, C, D]` keys and values; returns views `[R, H, span, D]` of all.

        Raises:
            ShapeError: if no pass was prepared for this shape.
        """
        self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take the room for keys and values of this shape, unless it was taken before."""
        if self.keys is None:
            n = self.places.rows * self.places.room  # zeros: NaN would come through a mask
            self.keys = key_states.new_zeros(n, key_states.shape[1], key_states.shape[3])
            self.values = value_states.new_zeros(n, value_states.shape[1], value_states.shape[3])
            self.is_initialized = True

    def get_seq_length(self) -> int:
        """Places shown to the model on top of the pass's own entries, as masks are shaped."""
        return self.places.span - self.places.width

    def get_max_length(self) -> int:
        """Places there is room for."""
        return self.places.room

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys a mask has to cover."""
        return self.places.span, 0

    def _write(self, store: Tensor, states: Tensor) -> Tensor:
        places, rows = self.places, states.shape[0]
        if places.index is None or places.index.shape[0] != rows * states.shape[2]:
            raise ShapeError(
                f"store: expected keys of the {places.width} entries of the pass, received "
                f"{list(states.shape)}; the layers of this model take another number"
            )
        store.index_copy_(0, places.index.to(store.device), states.transpose(1, 2).flatten(0, 1))
        shown = store.view(places.rows, places.room, *store.shape[1:])
        return shown[:rows, : places.span].transpose(1, 2)


@cache
def _layer_class() -> type[StoreLayer]:
    """`StoreLayer` as one of transformers' layers: a `Cache` asks no other kind for its length."""
    from transformers.cache_utils import CacheLayerMixin

    return type("StoreCacheLayer", (StoreLayer, CacheLayerMixin), {})


def make_form(reads: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """What may be looked at, `[R, C, S]` bool, as a mask `[R, 1, C, S]` in one of `FORMS`."""
    mask = reads[:, None]
    if form == "bool":
        return mask
    if form == "zero-one":
        return mask.to(dtype)
    never = torch.finfo(dtype).min
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, never)


class StoredCalls:
    """Passes of one model over a store.

    Args:
        model: for its configuration and dtype.
        call: runs it: ids `[R, C]` and options by name, as the model itself.

    Attributes:
        form: of masks, one of `FORMS`.
        dtype, device: of the model's first parameter.
        positions: entries computed since it was made, over all rows.

    Raises:
        UnsupportedModelError: a model whose configuration names no layers.
    """

    def __init__(self, model: Any, call: Callable[..., Any]) -> None:
        config = getattr(model, "config", None)
        inner = getattr(config, "get_text_config", None)
        config = inner() if callable(inner) else config
        self._n_layers = getattr(config, "num_hidden_layers", None)
        if not isinstance(self._n_layers, int):
            raise UnsupportedModelError(
                "model: expected a configuration with num_hidden_layers, received a "
                f"{type(model).__name__} without; its keys and values cannot be kept"
            )
        self._call, self.form, self.positions = call, FORMS[0], 0
        weight = next(p for p in model.parameters() if p.dtype.is_floating_point)
        self.dtype, self.device = weight.dtype, weight.device

    def reserve(self, rows: int, room: int) -> None:
        """Forget everything and make room for `room` places in each of `rows` rows."""
        from transformers.cache_utils import Cache

        self._places = Places(rows, room)
        layers: list[Any] = [_layer_class()(self._places) for _ in range(self._n_layers or 0)]
        self._cache = Cache(layers=layers)

    def run(self, tokens: Tensor, positions: Tensor, places: Tensor, reads: Tensor) -> Tensor:
        """One pass.

        Args:
            tokens, positions, places: `[R, C]` int64.
            reads: `[R, 1, S]` or `[R, C, S]` bool, which of the first S places an entry looks at;
                one that looks at nothing is shown itself, so that it stays a number.

        Returns:
            Logits `[R, C, V]`.
        """
        span = reads.shape[-1]
        self._places.aim(places, span)
        reads = reads.expand(-1, tokens.shape[1], -1)
        index = torch.arange(span, device=reads.device)
        reads = reads | (~reads.any(-1, keepdim=True) & (index == places[..., None]))
        out = self._call(
            tokens,
            attention_mask=make_form(reads, self.form, self.dtype),
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        self.positions += tokens.numel()
        logits: Tensor = out.logits
        return logits
