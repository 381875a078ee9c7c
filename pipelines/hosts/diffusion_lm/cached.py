"""Denoisers over a KV cache that is written and read at any indices.

A pass writes the keys and values of some entries of every row at any cache indices; then every
entry reads the indices that its mask names. So a cache plan is a set of positions, and one row of
the cache can hold several canvases. The model is called with explicit positions, a 4-D mask in the
form that it takes, and the stores of its layers.

Source of the idea: the replaced positions of C. Wu et al., "Fast-dLLM", 2025, arXiv 2505.22618.

Departures: one cache for all cache plans; the mask says what is read, never the cache's length.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.checks import check_int
from mmaccel.contracts import LAYER_METHODS, CanvasPass, Denoiser
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.model_parts import FinishedBlocks, LayerCounts, ReducedLayers
from mmaccel.pipelines.hosts.causal_lm.compatibility import (
    check_mode,
    find_device,
    find_layer_sizes,
    forward_parameters,
)
from mmaccel.pipelines.hosts.diffusion_lm.selected_logits import queried_logits
from mmaccel.pipelines.hosts.diffusion_lm.self_check import check_denoiser, scrambled_passes
from mmaccel.pipelines.hosts.layers.attention_function import window_attention_in
from mmaccel.pipelines.hosts.layers.attention_inputs import find_attending
from mmaccel.pipelines.hosts.layers.attention_name import find_configs
from mmaccel.pipelines.hosts.layers.masks import mask_reads
from mmaccel.pipelines.hosts.layers.methods import LayerMethods
from mmaccel.pipelines.hosts.layers.store import KVCacheLayout, make_cache
from mmaccel.pipelines.hosts.layers.stores import LayerStores
from mmaccel.pipelines.hosts.runner.own_products import (
    find_own_products,
    open_own_products,
    own_products,
)
from mmaccel.pipelines.hosts.transformers_release import OLD_CACHE, cache_argument
from mmaccel.samplers.canvas.layout import seen_blocks
from mmaccel.samplers.compare_logits import Tolerance, same_logits

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})

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


class _Called:
    """A `Watcher` that notes which layers call it, maybe with hidden states."""

    def __init__(self, reads_hidden: bool) -> None:
        self.layers: list[int] = []
        self.reads_hidden = reads_hidden

    def keep(
        self, layer: int, query: Tensor, key: Tensor, *,
        mask: Tensor | None, scale: float, hidden: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.layers.append(layer)


class CachedDenoiser(Denoiser, FinishedBlocks, ReducedLayers):
    """Base of these. A child says how its model is called, and runs the self-check when it is
    constructed, or is made of a model that passed one.

    Args:
        model: takes `input_ids`, `attention_mask`, `position_ids`, `use_cache` and a cache, or what
            `call_model` of a child gives it.
        mask_token: id of an open slot; None for a model of uniform corruption.
        shift: 1 if the logits at a position are those of the next one, 0 if they are its own.
        block: positions per block of a block-causal model.
        vocab_size: V, if only the first V ids may be drawn.
        images: (first id, V) of the image tokens, for canvases of images: 0..V-1 are these, V is
            the mask token, and the model's id i is V + 1 + i. So samplers see a small vocabulary,
            and a canvas can still hold every id of the model.

    Memory: keys and values of all cache indices, and a mask `[R, 1, C, P]`.
    """

    form: str = "additive"  # of 4-D masks, as `mask_reads` makes them
    reports_past_only: ClassVar[bool] = False
    spare: ClassVar[int] = 0  # cache indices beyond those reserved, which nothing reads
    # of the model, in passes with a cache and without
    cached_options: ClassVar[Mapping[str, Any]] = NO_OPTIONS
    plain_options: ClassVar[Mapping[str, Any]] = NO_OPTIONS

    supports_kv_cache = True  # may be set to False; every pass is then over all columns
    any_rows = True
    is_self_checked = True

    def __init__(
        self,
        model: Any,
        mask_token: int | None,
        *,
        shift: int = 0,
        block: int | None = None,
        vocab_size: int | None = None,
        images: tuple[int, int] | None = None,
    ) -> None:
        self.model = model
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
        self.max_positions = getattr(self.config, "max_sequence_length", None)  # LLaDA's name
        if self.max_positions is None:
            self.max_positions = getattr(self.config, "max_position_embeddings", None)
        self.stores: LayerStores | None = None
        self._methods = LayerMethods()
        self._branches = 1
        self._cache_argument = cache_argument(forward_parameters(model)) or OLD_CACHE

    def check(self) -> None:
        """Run the self-check: over the cache, and without where the model fails it there."""
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
        size = self.vocab_size  # V, the mask token; above it are the model's ids, moved by V + 1
        no_image = torch.where(tokens == size, self._open_id, tokens - size - 1)
        return torch.where(tokens < size, tokens + self.images[0], no_image)

    def take(self, logits: Tensor) -> Tensor:
        """Of logits `[..., V']` of all ids of the model those that may be drawn, `[..., V]`."""
        first = 0 if self.images is None else self.images[0]
        return logits[..., first : first + self.vocab_size]

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have no cache: `reserve` comes first, as always."""
        return vars(self) | {"stores": None, "_cache": None}

    @property
    def config(self) -> Any:
        """Of the model's decoder."""
        config = getattr(self.model, "config", None)
        get_text_config = getattr(config, "get_text_config", None)
        return get_text_config() if callable(get_text_config) else config

    @property
    def n_layers(self) -> int | None:
        """Attention layers; None where that is not known."""
        return getattr(self.config, "num_hidden_layers", None)

    @property
    def device(self) -> torch.device:
        return find_device(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's first parameter that is no integer."""
        return next(p for p in self.model.parameters() if p.dtype.is_floating_point).dtype

    @property
    def prompt_limit(self) -> int | None:
        """Blocks are chosen of rows without padding, whatever their batch."""
        methods = self._methods
        if methods.attention is not None and methods.attention.budget < 1:
            return 0
        return None if methods.evictor is None else methods.evictor.budget

    def lack(self, word: str, part: Any = None) -> str:
        """Cost: two short passes."""
        if not self.supports_kv_cache or word not in LAYER_METHODS:
            return super().lack(word, part)
        if self.block is None:
            return "its entries attend to later ones, so that no cached entry is final"
        if word in _LACKS:
            return _LACKS[word]
        if word == "own attention":
            return self._lack_of_attention(reads_hidden=False)
        if word == "hidden states":
            sizes = find_layer_sizes(self.config)
            if part.sizes not in (None, sizes):
                return f"it has {sizes}, and {part.name} is for {part.sizes}"
            return self._lack_of_attention(reads_hidden=True)
        return ""

    def _lack_of_attention(self, reads_hidden: bool) -> str:
        """Why layers cannot attend by our function, maybe with hidden states; "" if they can."""
        ids = torch.arange(6, device=self.device)[None] % 2
        entries = scrambled_passes(ids, None)[0]
        called = _Called(reads_hidden)

        def run() -> list[Tensor]:
            self.open_cache(1, entries.reads.shape[-1])
            return [self._run(entries, by_pass=False)]

        def attend() -> list[Tensor]:
            return [self._run(entries, by_pass=True, watcher=called)]

        try:
            reason = same_logits(run, attend, Tolerance.of(self.dtype))
        except UnsupportedModelError as error:
            return str(error)
        if called.layers != list(range(self.n_layers or 0)):
            reason = (
                f"{reason or 'logits'} where {len(called.layers)} of {self.n_layers} layers asked "
                "transformers for an attention function by name"
            )
        return f"under it {reason}" if reason else ""

    def use_methods(self, methods: LayerMethods, branches: int = 1) -> None:
        self._methods, self._branches = methods, branches
        # what they leave of a cache belongs to a row of the prompt
        self.any_rows = type(self).any_rows and not methods

    @property
    def layer_counts(self) -> LayerCounts:
        return LayerCounts() if self.stores is None else self.stores.counts

    def moved(self) -> None:
        self.stores = None

    def reserve(self, rows: int, cache_size: int) -> None:
        check_mode(self.model)
        open_own_products(self.model)
        if self.supports_kv_cache:
            self.open_cache(rows, cache_size)

    def open_cache(self, rows: int, cache_size: int) -> None:
        """As `reserve`, without checks of the model's mode."""
        if self.n_layers is None:
            raise UnsupportedModelError(
                "model: expected a configuration with num_hidden_layers, received a "
                f"{type(self.model).__name__} without; its keys and values cannot be cached"
            )
        layout = KVCacheLayout(rows, cache_size + self.spare, self.reports_past_only)
        self._cache = make_cache(self.n_layers, layout)
        self.stores = LayerStores(self._cache.layers, layout, self._methods, self._branches)

    def forward(self, entries: CanvasPass) -> Tensor:
        with own_products(find_own_products(self.model), entries.tokens):
            if self.supports_kv_cache:
                return self.run(entries)
            reads = entries.reads
            if self.block is not None:
                reads = reads & seen_blocks(entries.positions, entries.positions, self.block)
            return self._run_plain(entries, reads)

    def run(self, entries: CanvasPass) -> Tensor:
        """Logits `[R, Q, V]` of the queries; an entry that reads nothing reads itself (no NaN)."""
        assert self.stores is not None, "reserve comes first"
        return self._run(entries, by_pass=bool(self._methods), sparse=self.stores.sparse)

    def prefill(self, entries: CanvasPass) -> None:
        """Rows begin at the first index of the stores; later passes count indices as before."""
        assert self.stores is not None
        assert entries.lengths is not None and entries.start is not None
        lengths = entries.lengths
        width = entries.tokens.shape[1]
        index = torch.arange(width, device=lengths.device).expand_as(entries.tokens)
        # what an entry reads at cache indices, as columns of the prompt, which goes to the front
        at = entries.cache_indices[:, None].expand(-1, entries.reads.shape[1], -1)
        reads = entries.reads.gather(2, at) & (index < lengths[:, None])[:, None]
        observer = self.stores.observe(lengths)
        at_front = replace(entries, cache_indices=index, reads=reads)
        self._run(at_front, by_pass=True, watcher=observer)
        if observer is not None:
            self.stores.evict(lengths, observer, entries.start)
        if not self.stores.n_evicted[0]:
            self.stores.keep_all(entries.start)

    @torch.no_grad()
    def own_logits(self, tokens: Tensor) -> Tensor:
        index = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        reads = seen_blocks(index, index, self.block or tokens.shape[1])
        entries = CanvasPass(
            tokens=tokens, positions=index, cache_indices=index, reads=reads, queries=index
        )
        return self._run_plain(entries, reads)

    def _run(self, entries: CanvasPass, *, by_pass: bool, **fields: Any) -> Tensor:
        """A pass over the cache; the fields of its `WindowPass` are followed by layers, or not."""
        assert self.stores is not None
        reads = pad(entries.reads, (0, self.spare)) if self.spare else entries.reads
        this = self.stores.open_pass(entries.cache_indices, reads, **fields)
        layout = self.stores.layers[0].layout
        assert layout.indices is not None
        mask = mask_reads(layout.shift(reads), layout.indices, self.form, self.dtype)
        with ExitStack() as stack:
            if by_pass:
                attending = find_attending(self.model) if this.reads_hidden else []
                configs = find_configs(self.model)
                stack.enter_context(window_attention_in(configs, this, attending))
            return self._logits(entries, mask, self._cache)

    def _run_plain(self, entries: CanvasPass, reads: Tensor) -> Tensor:
        """A pass without a cache over all columns; reads `[R, 1, C]` or `[R, C, C]` bool."""
        mask = mask_reads(reads, entries.cache_indices, self.form, self.dtype)
        return self._logits(entries, mask, None)

    def _logits(self, entries: CanvasPass, mask: Tensor, cache: Any) -> Tensor:
        entries = replace(entries, tokens=self.to_model(entries.tokens))
        return self.take(self.call_model(entries, mask, cache))

    def call_model(self, entries: CanvasPass, mask: Tensor, cache: Any) -> Tensor:
        """The model's own logits `[R, Q, V']`, of all ids, under its mask `[R, 1, 1 or C, P]`."""
        return queried_logits(
            self.model,
            entries.queries,
            input_ids=entries.tokens,
            attention_mask=mask,
            position_ids=entries.positions,
            use_cache=cache is not None,
            **{self._cache_argument: cache},
            **(self.plain_options if cache is None else self.cached_options),
        )
