"""What denoisers have in common that keep keys and values at places of their own.

The model is called as it is, with explicit positions, a mask per entry and the cache of
`mmaccel.pipelines.causal_lm.kv_cache`: keys and values are written at their places first, then every
entry looks at the places it is told to. So a cache plan is nothing but sets of positions, and
several canvases can stand beside each other in one row.

Models whose logits are shifted by one: what scores an entry stands one position before it.

J. Ye et al., "Dream 7B: Diffusion Large Language Models", 2025, arXiv 2508.15487 (shift operation):
a model adapted from a causal one predicts the token at position i from its state at position i - 1.

Where the whole canvas is computed, that is another index. Where a pass computes some entries of a
row, the state before the first of them is missing, and is computed along: a further entry with the
token that stands there, written to no place that is read, looking at what its successor looks at
(under a block-causal model, at what its own block may see of that).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasPass
from mmaccel.errors import OptionError, ShapeError, UnsupportedModelError
from mmaccel.pipelines.causal_lm.compatibility import check_mode, check_room
from mmaccel.pipelines.causal_lm.kv_cache import KVCacheLayout, make_cache
from mmaccel.pipelines.diffusion_lm.registry import check_options
from mmaccel.pipelines.diffusion_lm.selected_logits import queried_logits


class Predecessors:
    """Remembers what stands at every place.

    Args:
        rows, places: as reserved.
        block: positions per block of a block-causal model, or None.
        device: of the passes.
    """

    def __init__(self, rows: int, places: int, block: int | None, device: torch.device) -> None:
        self._block = block
        self._positions = torch.full((rows, places), -1, device=device)
        self._tokens = torch.zeros_like(self._positions)

    def extend(self, entries: CanvasPass) -> CanvasPass:
        """The pass with its queries moved to the entries before them, computed where they are not.

        Cost: one host synchronisation, for the number of entries that are missing.
        """
        rows, count = entries.tokens.shape
        at, tokens = self._positions[:rows], self._tokens[:rows]  # [R, P], views
        at.scatter_(1, entries.cache_indices, entries.positions)
        tokens.scatter_(1, entries.cache_indices, entries.tokens)
        computed = torch.full_like(at, -1)  # entry of a place
        index = torch.arange(count, device=at.device).expand(rows, -1)
        computed.scatter_(1, entries.cache_indices, index)
        position = entries.positions.gather(1, entries.queries) - 1  # [R, Q]
        reads = self._reads(entries)  # [R, Q, P]
        found = reads & (at[:, None] == position[..., None])
        is_found, place = found.any(-1), found.int().argmax(-1)  # [R, Q]
        entry = computed.gather(1, place)
        queries = torch.where(is_found & (entry >= 0), entry, entries.queries)
        missing = is_found & (entry < 0)
        n_missing = int(missing.sum(1).max())
        if n_missing == 0:
            return replace(entries, queries=queries)
        chosen = (~missing).int().argsort(dim=1, stable=True)[:, :n_missing]  # [R, E]
        position = position.gather(1, chosen).clamp(min=0)
        wide = chosen[..., None].expand(-1, -1, reads.shape[-1])
        reads = reads.gather(1, wide)  # [R, E, P]
        if self._block is not None:
            reads = reads & (at[:, None] // self._block <= position[..., None] // self._block)
        own = entries.reads.expand(-1, count, -1)
        return CanvasPass(
            torch.cat([entries.tokens, tokens.gather(1, place.gather(1, chosen))], 1),
            torch.cat([entries.positions, position], 1),
            torch.cat([entries.cache_indices, torch.full_like(chosen, at.shape[1] - 1)], 1),
            torch.cat([own, reads], 1),
            torch.where(missing, count + missing.cumsum(1) - 1, queries),
        )

    def _reads(self, entries: CanvasPass) -> Tensor:
        """Places that every query looks at, `[R, Q, P]` bool."""
        wide = entries.queries[..., None].expand(-1, -1, entries.reads.shape[-1])
        if entries.reads.shape[1] == 1:
            return entries.reads.expand(wide.shape)
        return entries.reads.gather(1, wide)


class CachedDenoiser(ABC):
    """Base of these; see `mmaccel.canvas_contracts.Denoiser`. A child says how its model takes a
    mask, and checks it (`mmaccel.pipelines.diffusion_lm.self_check`) when it is made.

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
        self.supports_kv_cache = self.any_rows = True
        self._n_layers, self.max_positions = n_layers, most
        self._placement: KVCacheLayout | None = None
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

    def reserve(self, rows: int, cache_size: int) -> None:
        """Forget everything and make room; see `Denoiser.reserve`.

        Raises:
            OptionError: no rows or places, or a model in training mode that drops at random.
            UnsupportedModelError: nobody knows how many layers keep something.
        """
        check_room(rows, cache_size, None)
        check_mode(self.model)
        spare = self.spare if self.supports_kv_cache else 0
        self._placement = KVCacheLayout(rows, cache_size + spare)
        self._places = cache_size
        self._cache = None
        if self.supports_kv_cache:
            if self._n_layers is None:
                raise UnsupportedModelError(
                    "model: expected a configuration with num_hidden_layers, received a "
                    f"{type(self.model).__name__} without; its keys and values cannot be kept"
                )
            self._cache = make_cache(self._n_layers, self._placement)
        self._before = (
            Predecessors(rows, cache_size, self.block, self.device) if self.shift else None
        )

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
            place.aim(entries.cache_indices, place.room)
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
        is_whole = self.supports_kv_cache or width == places
        if place is None or rows > place.rows or places != self._places or not is_whole:
            room = "a call of reserve first" if place is None else f"{place.rows} x {self._places}"
            raise ShapeError(
                f"entries: expected at most rows x places as reserved ({room}), received {rows} x "
                f"{places}, {width} computed; call reserve(rows, cache_size)"
            )


def _look_back(positions: Tensor, block: int) -> Tensor:
    """`[R, N, N]` bool: what stands at `[R, N]` positions looks at no later block."""
    group = positions // block
    return group[:, None] <= group[..., None]
