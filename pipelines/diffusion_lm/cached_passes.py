"""Passes of a denoiser's model over the stores of its layers.

A pass computes some entries of every row, writes their keys and values at any cache indices, and
reads any indices. The model is called with explicit positions and a prepared 4-D mask, in the form
that it takes. Under methods of caches and attention its layers attend as a `WindowPass` says.

Source of the idea: the replaced positions of C. Wu et al., "Fast-dLLM", 2025, arXiv 2505.22618.

Departures: one cache for all cache plans; the mask says what is read, never the cache's length.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.contracts import CanvasPass, Route
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.causal_lm.compatibility import forward_parameters
from mmaccel.pipelines.diffusion_lm.selected_logits import queried_logits
from mmaccel.pipelines.layers.attention import window_attention_in
from mmaccel.pipelines.layers.attention_inputs import find_attending
from mmaccel.pipelines.layers.attention_name import find_configs
from mmaccel.pipelines.layers.methods import LayerMethods
from mmaccel.pipelines.layers.store import KVCacheLayout, make_cache, mask_reads
from mmaccel.pipelines.layers.stores import LayerStores
from mmaccel.pipelines.transformers_release import OLD_CACHE, cache_argument
from mmaccel.samplers.compare_logits import Tolerance, same_logits

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_CHECKED = 6  # entries of a self-check


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


class CachedPasses:
    """Passes of one model over a KV cache, and beside it.

    Args:
        model: takes `input_ids`, `attention_mask`, `position_ids`, `use_cache` and a cache.
        n_layers: attention layers; None takes what the configuration says.
        form: of 4-D masks, see `mmaccel.pipelines.layers.store.mask_reads`.
        reports_past_only: see `KVCacheLayout`.
        spare: cache indices beyond those reserved, which nothing reads.
        options, plain_options: further arguments of the model in passes with and without a cache.

    Attributes:
        model: see above.
        config: of the model's decoder.
        dtype, device: of the model's first parameter.
        route: as in `mmaccel.contracts.Model`.
        methods, branches: of the runs from the next `reserve` on.
        stores: of the layers, since `reserve`; None before.
    """

    route = Route()

    def __init__(
        self,
        model: Any,
        *,
        n_layers: int | None = None,
        form: str = "additive",
        reports_past_only: bool = False,
        spare: int = 0,
        options: Mapping[str, Any] = _NOTHING,
        plain_options: Mapping[str, Any] = _NOTHING,
    ) -> None:
        self.model, self.form = model, form
        self.methods = LayerMethods()
        self.branches = 1
        self.stores: LayerStores | None = None
        self._n_layers = n_layers or getattr(self.config, "num_hidden_layers", None)
        self._reports_past_only = reports_past_only
        self._spare = spare
        self._options = dict(options)
        self._plain_options = dict(plain_options)
        self._cache_argument = cache_argument(forward_parameters(model)) or OLD_CACHE

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
    def dtype(self) -> torch.dtype:
        """See the class."""
        return next(p for p in self.model.parameters() if p.dtype.is_floating_point).dtype

    @property
    def device(self) -> torch.device:
        """See the class."""
        return next(iter(self.model.parameters())).device

    def reserve(self, rows: int, cache_size: int) -> LayerStores:
        """Start an empty cache of `cache_size` indices in each of `rows` rows.

        Returns:
            The stores of its layers.

        Raises:
            UnsupportedModelError: the number of attention layers is not known.
        """
        if self._n_layers is None:
            raise UnsupportedModelError(
                "model: expected a configuration with num_hidden_layers, received a "
                f"{type(self.model).__name__} without; its keys and values cannot be cached"
            )
        layout = KVCacheLayout(rows, cache_size + self._spare, self._reports_past_only)
        self._cache = make_cache(self._n_layers, layout)
        self.stores = LayerStores(self._cache.layers, layout, self.methods, self.branches)
        return self.stores

    def run(self, entries: CanvasPass) -> Tensor:
        """One pass over the cache; logits `[R, Q, V]` of the queries.

        An entry that reads nothing reads itself, so that its logits are no NaN.
        """
        assert self.stores is not None, "reserve comes first"
        return self._run(entries, by_pass=bool(self.methods), sparse=self.stores.sparse)

    def run_all(
        self, tokens: Tensor, positions: Tensor, cache_indices: Tensor, reads: Tensor
    ) -> Tensor:
        """As `run`, with the logits `[R, C, V]` of all entries; arguments are those of a pass."""
        index = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.run(
            CanvasPass(
                tokens=tokens,
                positions=positions,
                cache_indices=cache_indices,
                reads=reads,
                queries=index,
            )
        )

    def prefill(self, entries: CanvasPass) -> None:
        """One pass over prompts from their first tokens on, of which a method then evicts entries.

        Rows begin at the first index of the stores. Later passes count cache indices as before.

        Args:
            entries: with `start` and `lengths`; a row's are in the order of their positions.
        """
        assert self.stores is not None
        assert entries.lengths is not None and entries.start is not None
        lengths = entries.lengths
        width = entries.tokens.shape[1]
        index = torch.arange(width, device=lengths.device).expand_as(entries.tokens)
        at = entries.cache_indices[:, None].expand(-1, entries.reads.shape[1], -1)
        reads = entries.reads.gather(2, at) & (index < lengths[:, None])[:, None]
        observer = self.stores.observe(lengths)
        at_front = replace(entries, cache_indices=index, reads=reads)
        self._run(at_front, by_pass=True, watcher=observer)
        if observer is not None:
            self.stores.evict(lengths, observer, entries.start)
        if not self.stores.n_evicted[0]:
            self.stores.keep_all(entries.start)

    def run_plain(self, entries: CanvasPass, reads: Tensor) -> Tensor:
        """One pass without a cache; logits `[R, Q, V]` of the queries.

        Args:
            entries: all columns of its rows.
            reads: `[R, 1, C]` or `[R, C, C]` bool, the columns that an entry attends to.
        """
        mask = mask_reads(reads, entries.cache_indices, self.form, self.dtype)
        return self._call(entries, mask, None, self._plain_options)

    def find_obstacle(self, *, reads_hidden: bool = False) -> str:
        """Why the layers do not attend by a function of ours; empty where they do.

        Every layer must call it once, and the logits must be those of the model's own attention.

        Args:
            reads_hidden: whether hidden states of the layers are wanted.

        Cost: two short passes; `reserve` comes next.
        """
        index = torch.arange(_CHECKED, device=self.device)[None]
        reads = torch.ones(1, 1, _CHECKED + 1, dtype=torch.bool, device=self.device)
        reads[..., -1] = False
        entries = CanvasPass(
            tokens=index % 2, positions=index, cache_indices=index, reads=reads, queries=index
        )
        called = _Called(reads_hidden)

        def run() -> list[Tensor]:
            self.reserve(1, _CHECKED + 1)
            return [self.run(entries)]

        def attend() -> list[Tensor]:
            return [self._run(entries, by_pass=True, watcher=called)]

        try:
            reason = same_logits(run, attend, Tolerance.of(self.dtype))
        except UnsupportedModelError as error:
            return str(error)
        n_layers = self._n_layers or 0
        if called.layers != list(range(n_layers)):
            reason = (
                f"{reason or 'logits'} where {len(called.layers)} of {n_layers} layers asked "
                "transformers for an attention function by name"
            )
        return f"under it {reason}" if reason else ""

    def _run(self, entries: CanvasPass, *, by_pass: bool, **fields: Any) -> Tensor:
        """A pass over the cache; fields of its `WindowPass`, which the layers follow or not."""
        assert self.stores is not None
        reads = pad(entries.reads, (0, self._spare)) if self._spare else entries.reads
        this = self.stores.open_pass(entries.cache_indices, reads, **fields)
        layout = self.stores.layers[0].layout
        assert layout.indices is not None
        mask = mask_reads(layout.shift(reads), layout.indices, self.form, self.dtype)
        with ExitStack() as stack:
            if by_pass:
                attending = find_attending(self.model) if this.reads_hidden else []
                configs = find_configs(self.model)
                stack.enter_context(window_attention_in(configs, this, attending))
            return self._call(entries, mask, self._cache, self._options)

    def _call(
        self, entries: CanvasPass, mask: Tensor, cache: Any, options: Mapping[str, Any]
    ) -> Tensor:
        return queried_logits(
            self.model,
            entries.queries,
            input_ids=entries.tokens,
            attention_mask=mask,
            position_ids=entries.positions,
            use_cache=cache is not None,
            **{self._cache_argument: cache},
            **options,
        )
