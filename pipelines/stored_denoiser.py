"""What denoisers have in common that keep keys and values at places of their own.

The model is called as it is, with explicit positions, a mask per entry and the cache of
`mmaccel.pipelines.window_cache`: keys and values are written at their places first, then every
entry looks at the places it is told to. So a cache plan is nothing but sets of positions, and
several canvases can stand beside each other in one row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasPass
from mmaccel.errors import OptionError, ShapeError, UnsupportedModelError
from mmaccel.pipelines.denoiser_checks import check_options
from mmaccel.pipelines.predecessors import Predecessors
from mmaccel.pipelines.queried_logits import queried_logits
from mmaccel.pipelines.window_cache import Placement, make_cache
from mmaccel.pipelines.window_checks import check_mode, check_room


class StoredDenoiser(ABC):
    """Base of these; see `mmaccel.canvas_contracts.Denoiser`. A child says how its model takes a
    mask, and checks it (`mmaccel.pipelines.denoiser_trial`) when it is made.

    Args:
        model: takes `input_ids`, `attention_mask`, `position_ids`, `past_key_values`, `use_cache`.
        mask_token: id of an open slot, or None.
        n_layers: attention layers; None where nobody knows.
        most: positions the model was made for, or None.
        shift: 1 if the logits at a position are those of the next one, 0 if they are its own.
        block: positions per block of a block-causal model.
        vocab_size: V, if only the first V ids may be drawn.

    Attributes:
        has_store: may be set to False; every pass then is over everything, without a cache.
        spare: places beyond those asked for, which nothing ever looks at.
        options: what else the model is called with where a cache is given; where none is, with
            `plain_options`.
        n_ids: ids that the model knows.

    Memory: keys and values of all places, taken at the first pass, and a mask `[R, 1, C, P]`.
    """

    spare = 0
    options: Mapping[str, Any] = MappingProxyType({})
    plain_options: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        model: Any,
        mask_token: int | None,
        n_layers: int | None,
        most: int | None,
        *,
        shift: int = 0,
        block: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        full = int(model.get_output_embeddings().weight.shape[0])
        self.n_ids = int(model.get_input_embeddings().weight.shape[0])
        check_options(shift, block, mask_token, self.n_ids)
        if vocab_size is not None and not 1 <= vocab_size <= full:
            raise OptionError(
                f"vocab_size: expected 1..{full}, received {vocab_size}; None keeps all {full} ids"
            )
        self.model, self.mask_token, self.shift, self.block = model, mask_token, shift, block
        self.vocab_size = full if vocab_size is None else vocab_size
        self.has_store = self.any_rows = True
        self._n_layers, self.max_positions = n_layers, most
        self._placement: Placement | None = None
        self._before: Predecessors | None = None

    @abstractmethod
    def mask(self, reads: Tensor, entries: CanvasPass) -> Tensor:
        """The mask of a pass as the model takes it.

        Args:
            reads: `[R, 1, S]` or `[R, C, S]` bool, which of the S places an entry looks at.
            entries: of the pass.

        Returns:
            `[R, 1, C, S]`.
        """

    @property
    def device(self) -> torch.device:
        """Where the model's first parameter is."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the model."""
        return self.model.dtype

    def reserve(self, rows: int, places: int) -> None:
        """Forget everything and make room; see `Denoiser.reserve`.

        Raises:
            OptionError: no rows or places, or a model in training mode that drops at random.
            UnsupportedModelError: nobody knows how many layers keep something.
        """
        check_room(rows, places, None)
        check_mode(self.model)
        spare = self.spare if self.has_store else 0
        self._placement = Placement(rows, places + spare)
        self._places = places
        self._cache = None
        if self.has_store:
            if self._n_layers is None:
                raise UnsupportedModelError(
                    "model: expected a configuration with num_hidden_layers, received a "
                    f"{type(self.model).__name__} without; its keys and values cannot be kept"
                )
            self._cache = make_cache(self._n_layers, self._placement)
        self._before = Predecessors(rows, places, self.block, self.device) if self.shift else None

    def forward(self, entries: CanvasPass) -> Tensor:
        """One pass; see `Denoiser.forward`.

        Cost: one pass; entries before the queried ones are computed along where `shift` needs them
        and nothing else does. They are no positions of the canvas, and no ledger counts them.

        Raises:
            ShapeError: before `reserve`, or for more rows or other places than reserved.
            OptionError: a position beyond those the model was made for.
        """
        self._check(entries)
        place = self._placement
        assert place is not None
        if self.max_positions is not None and self._places > self.max_positions:
            check_room(1, int(entries.positions.max()) + 1, self.max_positions)
        if self._before is not None:
            entries = self._before.extend(entries)
        reads = entries.reads
        if self._cache is not None:
            place.aim(entries.places, place.room)
            reads = torch.nn.functional.pad(reads, (0, self.spare)) if self.spare else reads
        elif self.block is not None:
            reads = reads & _look_back(entries.positions, self.block)
        logits = self._call(entries, reads, self._cache)
        return logits[..., : self.vocab_size]

    @torch.no_grad()
    def own_logits(self, tokens: Tensor) -> Tensor:
        """What the model itself makes of whole rows, in order and without a cache, for self-checks.

        Args:
            tokens: `[R, N]` int64.

        Returns:
            `[R, N, V]`; under `shift` the first position's mean nothing.
        """
        line = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        reads = _look_back(line, self.block or tokens.shape[1])
        logits = self._call(CanvasPass(tokens, line, line, reads, line), reads, None)
        return logits.roll(self.shift, 1)[..., : self.vocab_size]

    def _call(self, entries: CanvasPass, reads: Tensor, cache: Any) -> Tensor:
        return queried_logits(
            self.model,
            entries.queries,
            input_ids=entries.tokens,
            attention_mask=self.mask(reads, entries),
            position_ids=entries.positions,
            past_key_values=cache,
            use_cache=cache is not None,
            **(self.plain_options if cache is None else self.options),
        )

    def _check(self, entries: CanvasPass) -> None:
        place = self._placement
        (rows, width), places = entries.tokens.shape, entries.reads.shape[-1]
        is_whole = self.has_store or width == places
        if place is None or rows > place.rows or places != self._places or not is_whole:
            room = "a call of reserve first" if place is None else f"{place.rows} x {self._places}"
            raise ShapeError(
                f"entries: expected at most rows x places as reserved ({room}), received {rows} x "
                f"{places}, {width} computed; call reserve(rows, places)"
            )


def _look_back(positions: Tensor, block: int) -> Tensor:
    """`[R, N, N]` bool: what stands at `[R, N]` positions looks at no later block."""
    group = positions // block
    return group[:, None] <= group[..., None]
