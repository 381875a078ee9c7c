"""Denoisers over a KV cache that is written and read at any indices.

The model is called with explicit positions, a mask per entry and the stores of its layers
(`mmaccel.pipelines.diffusion_lm.cached_passes`). Keys and values are written at their cache indices
first; then every entry reads the indices that its mask names. So a cache plan is a set of
positions, and one row of the cache can hold several canvases.

Some models have logits shifted by one: the token at position i is predicted from the state at
position i - 1 (J. Ye et al., "Dream 7B: Diffusion Large Language Models", 2025, arXiv 2508.15487).
A pass over a whole canvas reads these logits at another index. A pass over some entries of a row
lacks the state before the first of them. That state is computed along: one more entry, with the
token at that position, written to a cache index that nothing reads. It reads what its successor
reads; under a block-causal model, only what its own block may see of that.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmaccel.checks import check_int
from mmaccel.contracts import LAYER_METHODS, CanvasPass, Denoiser
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.model_parts import FinishedBlocks, LayerCounts, ReducedLayers
from mmaccel.pipelines.causal_lm.compatibility import (
    check_mode,
    find_device,
    find_layer_sizes,
)
from mmaccel.pipelines.diffusion_lm.cached_passes import CachedPasses
from mmaccel.pipelines.diffusion_lm.self_check import check_denoiser
from mmaccel.pipelines.layers.methods import LayerMethods
from mmaccel.pipelines.runner.own_products import (
    find_own_products,
    open_own_products,
    own_products,
)
from mmaccel.samplers.canvas.layout import seen_blocks

_LACKS = {  # words of methods that need more of a cache than entries of finished blocks
    "packed entries": "its cache stays as it is after the prompt",
    "prompt blocks": "it processes prompts in blocks that see each other, not causally",
    "rounds": (
        "its cache is evicted once, after the prompt, since rounds count tokens that are accepted "
        "one after the other, and its blocks are filled in any order; leave every out"
    ),
    "turned keys": "its entries stand at the positions of its canvas; leave rerotate out",
    "uneven heads": "its entries say what they read, and heads would hold different ones",
}


def lack_of_blocks(passes: CachedPasses, word: str, part: Any) -> str:
    """Why layers whose blocks are cached lack a word of `LAYER_METHODS`."""
    if word in _LACKS:
        return _LACKS[word]
    if word == "own attention":
        return passes.find_obstacle()
    if word == "hidden states":
        sizes = find_layer_sizes(passes.config)
        if part.sizes not in (None, sizes):
            return f"it has {sizes}, and {part.name} is for {part.sizes}"
        return passes.find_obstacle(reads_hidden=True)
    return ""


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
        self._positions = torch.full(
            (rows, size), -1, device=device, dtype=torch.int64
        )  # written at a cache index
        self._tokens = torch.zeros_like(self._positions)

    def extend(self, entries: CanvasPass) -> CanvasPass:
        """The pass with its queries moved to the entries before them, computed where they are not.

        Cost: one host synchronisation, for the number of entries that are missing.
        """
        rows, count = entries.tokens.shape
        at, tokens = self._positions[:rows], self._tokens[:rows]  # [R, P], views
        self.note(entries)
        computed = torch.full_like(at, -1)  # entry that is written at a cache index
        index = torch.arange(count, device=at.device).expand(rows, -1)
        computed.scatter_(1, entries.cache_indices, index)
        position = entries.positions.gather(1, entries.queries) - 1  # [R, Q]
        reads = self._reads(entries)  # [R, Q, P]
        found = reads & (at[:, None] == position[..., None])
        is_found, cache_index = found.any(-1), found.int().argmax(-1)  # [R, Q]
        entry = computed.gather(1, cache_index)
        queries = torch.where(is_found & (entry >= 0), entry, entries.queries)
        written = entries.cache_indices.gather(1, entries.queries)
        missing = is_found & (entry < 0) & (written < at.shape[1] - 1)  # the last is of padding
        n_missing = int(missing.sum(1).max())
        if n_missing == 0:
            return replace(entries, queries=queries)
        chosen = (~missing).int().argsort(dim=1, stable=True)[:, :n_missing]  # [R, E]
        position = position.gather(1, chosen).clamp(min=0)
        wide = chosen[..., None].expand(-1, -1, reads.shape[-1])
        reads = reads.gather(1, wide)  # [R, E, P]
        if self._block is not None:
            reads = reads & seen_blocks(at, position, self._block)
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

    def note(self, entries: CanvasPass) -> None:
        """Keep where a pass writes its entries."""
        rows = len(entries.tokens)
        self._positions[:rows].scatter_(1, entries.cache_indices, entries.positions)
        self._tokens[:rows].scatter_(1, entries.cache_indices, entries.tokens)

    def _reads(self, entries: CanvasPass) -> Tensor:
        """Cache indices that every query reads, `[R, Q, P]` bool."""
        wide = entries.queries[..., None].expand(-1, -1, entries.reads.shape[-1])
        if entries.reads.shape[1] == 1:
            return entries.reads.expand(wide.shape)
        return entries.reads.gather(1, wide)


class CachedDenoiser(Denoiser, FinishedBlocks, ReducedLayers):
    """Base of these; see `mmaccel.contracts.Denoiser`.

    A child runs the self-check when it is constructed, or is made of a model that passed one.

    Args:
        passes: of the model.
        mask_token: id of an open slot; None for a model of uniform corruption.
        shift: 1 if the logits at a position are those of the next one, 0 if they are its own.
        block: positions per block of a block-causal model.
        vocab_size: V, if only the first V ids may be drawn.
        images: (first id, V) of the image tokens, for canvases of images: 0..V-1 are these, V is
            the mask token, and the model's id i is V + 1 + i. So samplers see a small vocabulary,
            and a canvas can still hold every id of the model: prompts, and tokens between the rows
            of an image.

    Attributes:
        supports_kv_cache: may be set to False; every pass is then over all columns.

    Raises:
        OptionError: an option outside its domain.

    Memory: keys and values of all cache indices, allocated at the first pass, and a mask
        `[R, 1, C, P]`.
    """

    supports_kv_cache = True
    any_rows = True
    is_self_checked = True

    def __init__(
        self,
        passes: CachedPasses,
        mask_token: int | None,
        *,
        shift: int = 0,
        block: int | None = None,
        vocab_size: int | None = None,
        images: tuple[int, int] | None = None,
    ) -> None:
        self.cached, self.model = passes, passes.model
        n_drawn = int(self.model.get_output_embeddings().weight.shape[0])
        n_ids = int(self.model.get_input_embeddings().weight.shape[0])
        check_int("shift", shift, 0, 1, hint="1 where logits are those of the next position")
        if block is not None:
            check_int("block", block, 1, hint="leave it out for the model's own")
        if mask_token is not None:
            hint = "see the tokenizer's mask_token_id, or None for uniform corruption"
            check_int("mask_token", mask_token, 0, n_ids - 1, hint=hint)
        if vocab_size is not None:
            check_int("vocab_size", vocab_size, 1, n_drawn, hint=f"None keeps all {n_drawn} ids")
        self.mask_token, self.shift, self.block, self.n_ids = mask_token, shift, block, n_ids
        self.vocab_size = n_drawn if vocab_size is None else vocab_size
        self.images, self._open_id = images, mask_token
        if images is not None:
            first, self.vocab_size = images
            self.mask_token = self.vocab_size
            if first < 0 or self.vocab_size < 1 or first + self.vocab_size > n_ids:
                raise OptionError(
                    f"images: expected (first id, count) within {n_ids} ids, received {images}; "
                    "None for canvases of text"
                )
        most = getattr(passes.config, "max_position_embeddings", None)
        # as LLaDA's configuration calls it
        own = getattr(passes.config, "max_sequence_length", None)
        self.max_positions = most if own is None else own
        self._predecessors: Predecessors | None = None

    def check(self) -> None:
        """Run the self-check: over the cache, and without where the model fails it there.

        Raises:
            UnsupportedModelError: a model that fails it without a cache, too.
        """
        check_mode(self.model)
        try:
            check_denoiser(self)
        except UnsupportedModelError as error:
            if not self.supports_kv_cache:
                raise
            self.supports_kv_cache = False
            self.kv_cache_reason = str(error)
            check_denoiser(self)

    def to_canvas(self, ids: Tensor) -> Tensor:
        """Ids of the model, as in a prompt or a layout, in the numbering of canvases."""
        return ids if self.images is None else ids + self.vocab_size + 1

    def to_model(self, tokens: Tensor) -> Tensor:
        """Tokens of a canvas, as the model's ids."""
        if self.images is None:
            return tokens
        assert self._open_id is not None
        size = self.vocab_size
        other = torch.where(tokens == size, self._open_id, tokens - size - 1)
        return torch.where(tokens < size, tokens + self.images[0], other)

    def take(self, logits: Tensor) -> Tensor:
        """Of logits `[..., V']` of all ids of the model those that may be drawn, `[..., V]`."""
        first = 0 if self.images is None else self.images[0]
        return logits[..., first : first + self.vocab_size]

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have no cache: `reserve` comes first, as always."""
        own = {"cached": copy(self.cached), "_predecessors": None}
        return vars(self) | own

    @property
    def device(self) -> torch.device:
        """Where the model takes its tokens."""
        return find_device(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return self.model.dtype

    @property
    def prompt_limit(self) -> int | None:
        """See `FinishedBlocks`. Blocks are chosen of rows without padding, whatever their batch."""
        methods = self.cached.methods
        if methods.attention is not None and methods.attention.budget < 1:
            return 0
        return None if methods.evictor is None else methods.evictor.budget

    def lack(self, word: str, part: Any = None) -> str:
        """See `mmaccel.capabilities.Capable`. Cost: two short passes."""
        if not self.supports_kv_cache or word not in LAYER_METHODS:
            return super().lack(word, part)
        if self.block is None:
            return "its entries attend to later ones, so that no cached entry is final"
        return lack_of_blocks(self.cached, word, part)

    def use_methods(self, methods: LayerMethods, branches: int = 1) -> None:
        self.cached.methods = methods
        self.cached.branches = branches
        # what they leave of a cache belongs to a row of the prompt
        self.any_rows = type(self).any_rows and not methods

    @property
    def layer_counts(self) -> LayerCounts:
        stores = self.cached.stores
        return LayerCounts() if stores is None else stores.counts

    def moved(self) -> None:
        """Drop the cache: the weights are on another device or in another dtype."""
        self._predecessors = self.cached.stores = None

    def reserve(self, rows: int, cache_size: int) -> None:
        """Start an empty cache; see `Denoiser.reserve`.

        Raises:
            OptionError: a model in training mode with dropout.
            UnsupportedModelError: the number of attention layers is not known.
        """
        check_mode(self.model)
        open_own_products(self.model)
        if self.supports_kv_cache:
            self.cached.reserve(rows, cache_size)
        self._predecessors = None
        if self.shift:
            self._predecessors = Predecessors(rows, cache_size, self.block, self.device)

    def forward(self, entries: CanvasPass) -> Tensor:
        """One pass; see `Denoiser.forward`.

        Cost: one pass. Entries that are computed along for `shift` are not counted as positions of
        the canvas.
        """
        if self._predecessors is not None:
            entries = self._predecessors.extend(entries)
        entries = replace(entries, tokens=self.to_model(entries.tokens))
        with own_products(find_own_products(self.model), entries.tokens):
            if self.supports_kv_cache:
                return self.take(self.cached.run(entries))
            reads = entries.reads
            if self.block is not None:
                reads = reads & seen_blocks(entries.positions, entries.positions, self.block)
            return self.take(self.cached.run_plain(entries, reads))

    def prefill(self, entries: CanvasPass) -> None:
        if self._predecessors is not None:
            self._predecessors.note(entries)
        self.cached.prefill(entries)

    @torch.no_grad()
    def own_logits(self, tokens: Tensor) -> Tensor:
        """See `Denoiser.own_logits`."""
        index = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        reads = seen_blocks(index, index, self.block or tokens.shape[1])
        ids = self.to_model(tokens)
        entries = CanvasPass(
            tokens=ids, positions=index, cache_indices=index, reads=reads, queries=index
        )
        return self.take(self.cached.run_plain(entries, reads).roll(self.shift, 1))
