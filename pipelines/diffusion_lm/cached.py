"""Denoisers over a KV cache that is written and read at any indices.

The model is called with explicit positions, a mask per entry and the cache of
`mmaccel.pipelines.layers.store`. Keys and values are written at their cache indices first;
then every entry reads the indices that its mask names. So a cache plan is a set of positions, and
one row of the cache can hold several canvases.

Some models have logits shifted by one: the token at position i is predicted from the state at
position i - 1 (J. Ye et al., "Dream 7B: Diffusion Large Language Models", 2025, arXiv 2508.15487).
A pass over a whole canvas reads these logits at another index. A pass over some entries of a row
lacks the state before the first of them. That state is computed along: one more entry, with the
token at that position, written to a cache index that nothing reads. It reads what its successor
reads; under a block-causal model, only what its own block may see of that.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import CanvasPass, Denoiser
from mmaccel.errors import OptionError, ShapeError, UnsupportedModelError
from mmaccel.pipelines.causal_lm.compatibility import (
    check_capacity,
    check_mode,
    find_device,
    forward_parameters,
)
from mmaccel.pipelines.diffusion_lm.options import check_options
from mmaccel.pipelines.diffusion_lm.selected_logits import queried_logits
from mmaccel.pipelines.layers.store import KVCacheLayout, make_cache
from mmaccel.pipelines.transformers_release import OLD_CACHE, cache_argument


class Predecessors:
    """Adds to a pass the entries before its queries, for a model with shifted logits.

    Args:
        rows: rows of the cache.
        size: P, cache indices of a row.
        block: positions per block of a block-causal model, or None.
        device: of the passes.
    """

    def __init__(self, rows: int, size: int, block: int | None, device: torch.device) -> None:
        self._block = block
        self._positions = torch.full((rows, size), -1, device=device)  # written at a cache index
        self._tokens = torch.zeros_like(self._positions)

    def extend(self, entries: CanvasPass) -> CanvasPass:
        """The pass with its queries moved to the entries before them, computed where they are not.

        Cost: one host synchronisation, for the number of entries that are missing.
        """
        rows, count = entries.tokens.shape
        at, tokens = self._positions[:rows], self._tokens[:rows]  # [R, P], views
        at.scatter_(1, entries.cache_indices, entries.positions)
        tokens.scatter_(1, entries.cache_indices, entries.tokens)
        computed = torch.full_like(at, -1)  # entry that is written at a cache index
        index = torch.arange(count, device=at.device).expand(rows, -1)
        computed.scatter_(1, entries.cache_indices, index)
        position = entries.positions.gather(1, entries.queries) - 1  # [R, Q]
        reads = self._reads(entries)  # [R, Q, P]
        found = reads & (at[:, None] == position[..., None])
        is_found, cache_index = found.any(-1), found.int().argmax(-1)  # [R, Q]
        entry = computed.gather(1, cache_index)
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
            tokens=torch.cat([entries.tokens, tokens.gather(1, cache_index.gather(1, chosen))], 1),
            positions=torch.cat([entries.positions, position], 1),
            cache_indices=torch.cat(
                [entries.cache_indices, torch.full_like(chosen, at.shape[1] - 1)], 1
            ),
            reads=torch.cat([own, reads], 1),
            queries=torch.where(missing, count + missing.cumsum(1) - 1, queries),
        )

    def _reads(self, entries: CanvasPass) -> Tensor:
        """Cache indices that every query reads, `[R, Q, P]` bool."""
        wide = entries.queries[..., None].expand(-1, -1, entries.reads.shape[-1])
        if entries.reads.shape[1] == 1:
            return entries.reads.expand(wide.shape)
        return entries.reads.gather(1, wide)


class CachedDenoiser(Denoiser):
    """Base of these; see `mmaccel.contracts.Denoiser`.

    A child builds the mask that its model takes, and runs the self-check of
    `mmaccel.pipelines.diffusion_lm.self_check` when it is constructed.

    Args:
        model: takes `input_ids`, `attention_mask`, `position_ids`, `use_cache` and a cache, as
            `cache` or `past_key_values`.
        mask_token: id of an open slot, or None.
        n_layers: attention layers; None where the configuration does not say.
        max_positions: positions of the model, or None.
        shift: 1 if the logits at a position are those of the next one, 0 if they are its own.
        block: positions per block of a block-causal model.
        vocab_size: V, if only the first V ids may be drawn.

    Attributes:
        supports_kv_cache: may be set to False; every pass is then over all columns.
        spare: cache indices beyond those reserved, which nothing reads.
        options: further arguments of the model in passes with a cache.
        plain_options: further arguments of the model in passes without a cache.
        n_ids: ids of the model.

    Memory: keys and values of all cache indices, allocated at the first pass, and a mask
        `[R, 1, C, P]`.
    """

    spare = 0
    options: Mapping[str, Any] = MappingProxyType({})
    plain_options: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        model: Any,
        mask_token: int | None,
        n_layers: int | None,
        max_positions: int | None,
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
        self.supports_kv_cache = True
        self.any_rows = True
        self._n_layers, self.max_positions = n_layers, max_positions
        self._cache_argument = cache_argument(forward_parameters(model)) or OLD_CACHE
        self._layout: KVCacheLayout | None = None
        self._predecessors: Predecessors | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have no cache: `reserve` comes first, as always."""
        return vars(self) | {"_layout": None, "_cache": None, "_predecessors": None}

    @abstractmethod
    def mask(self, reads: Tensor, entries: CanvasPass) -> Tensor:
        """The mask of a pass in the form that the model takes.

        Args:
            reads: `[R, 1, S]` or `[R, C, S]` bool, which of the S cache indices an entry reads.
            entries: of the pass.

        Returns:
            `[R, 1, C, S]`.
        """

    @property
    def device(self) -> torch.device:
        """Where the model takes its tokens."""
        return find_device(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return self.model.dtype

    def moved(self) -> None:
        """Drop the cache: the weights are on another device or in another dtype."""
        self._layout = self._cache = self._predecessors = None

    def reserve(self, rows: int, cache_size: int) -> None:
        """Start an empty cache; see `Denoiser.reserve`.

        Raises:
            OptionError: no rows or no cache, or a model in training mode with dropout.
            UnsupportedModelError: the number of attention layers is not known.
        """
        check_capacity(rows, cache_size, None)
        check_mode(self.model)
        spare = self.spare if self.supports_kv_cache else 0
        self._layout = KVCacheLayout(rows, cache_size + spare)
        self._cache_size = cache_size
        self._cache = None
        if self.supports_kv_cache:
            if self._n_layers is None:
                raise UnsupportedModelError(
                    "model: expected a configuration with num_hidden_layers, received a "
                    f"{type(self.model).__name__} without; its keys and values cannot be cached"
                )
            self._cache = make_cache(self._n_layers, self._layout)
        self._predecessors = None
        if self.shift:
            self._predecessors = Predecessors(rows, cache_size, self.block, self.device)

    def forward(self, entries: CanvasPass) -> Tensor:
        """One pass; see `Denoiser.forward`.

        Cost: one pass. Entries that are computed along for `shift` are not counted as positions of
        the canvas.

        Raises:
            ShapeError: before `reserve`, or for more rows or another cache size than reserved.
            OptionError: a position beyond `max_positions`.
        """
        self._check(entries)
        layout = self._layout
        assert layout is not None
        if self.max_positions is not None and self._cache_size > self.max_positions:
            check_capacity(1, int(entries.positions.max()) + 1, self.max_positions)
        if self._predecessors is not None:
            entries = self._predecessors.extend(entries)
        reads = entries.reads
        if self._cache is not None:
            layout.prepare(entries.cache_indices, layout.max_length)
            reads = torch.nn.functional.pad(reads, (0, self.spare)) if self.spare else reads
        elif self.block is not None:
            reads = reads & _block_causal(entries.positions, self.block)
        logits = self._call(entries, reads, self._cache)
        return logits[..., : self.vocab_size]

    @torch.no_grad()
    def own_logits(self, tokens: Tensor) -> Tensor:
        """The model's logits of whole rows, in order and without a cache, for self-checks.

        Args:
            tokens: `[R, N]` int64.

        Returns:
            `[R, N, V]`; with `shift`, those of the first position are not valid.
        """
        index = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        reads = _block_causal(index, self.block or tokens.shape[1])
        logits = self._call(
            CanvasPass(
                tokens=tokens, positions=index, cache_indices=index, reads=reads, queries=index
            ),
            reads,
            None,
        )
        return logits.roll(self.shift, 1)[..., : self.vocab_size]

    def _call(self, entries: CanvasPass, reads: Tensor, cache: Any) -> Tensor:
        return queried_logits(
            self.model,
            entries.queries,
            input_ids=entries.tokens,
            attention_mask=self.mask(reads, entries),
            position_ids=entries.positions,
            use_cache=cache is not None,
            **{self._cache_argument: cache},
            **(self.plain_options if cache is None else self.options),
        )

    def _check(self, entries: CanvasPass) -> None:
        layout = self._layout
        (rows, width), cache_size = entries.tokens.shape, entries.reads.shape[-1]
        is_whole = self.supports_kv_cache or width == cache_size
        if layout is None or rows > layout.rows or cache_size != self._cache_size or not is_whole:
            reserved = "nothing" if layout is None else f"{layout.rows} x {self._cache_size}"
            raise ShapeError(
                f"entries: expected at most rows x indices as reserved ({reserved}), received "
                f"{rows} x {cache_size}, {width} computed; call reserve first"
            )


def _block_causal(positions: Tensor, block: int) -> Tensor:
    """`[R, N, N]` bool: entries at `[R, N]` positions read no later block."""
    group = positions // block
    return group[:, None] <= group[..., None]
