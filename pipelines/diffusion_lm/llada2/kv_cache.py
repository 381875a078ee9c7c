"""Passes of a LLaDA2 over a KV cache, with the form of 4-D mask that the model takes.

A pass computes some entries of every row, writes their keys and values at any cache indices, and
reads any indices. The model is called with explicit positions and a prepared 4-D mask, over the
cache of `mmaccel.pipelines.layers.store`.

Source of the idea: the replaced positions of C. Wu et al., "Fast-dLLM", 2025, arXiv 2505.22618.

Departures: one cache for all cache plans; the mask says what is read, never the cache's length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.causal_lm.compatibility import forward_parameters
from mmaccel.pipelines.diffusion_lm.llada2.block_masks import make_form
from mmaccel.pipelines.layers.store import KVCacheLayout, make_cache
from mmaccel.pipelines.transformers_release import OLD_CACHE, cache_argument


class CachedModel:
    """Passes of one model over a KV cache.

    Args:
        model: for its configuration and dtype.
        call: runs the model: ids `[R, C]` and options by name.
        form: of 4-D masks, see `mmaccel.pipelines.diffusion_lm.llada2.block_masks.BlockMasks`.

    Attributes:
        config: of the model's decoder.
        dtype, device: of the model's first parameter.
        model, activation_format: as in `mmaccel.contracts.Model`, for its arithmetic.

    Raises:
        UnsupportedModelError: a model whose configuration has no number of layers.
    """

    model: Any = None
    activation_format = ""

    def __init__(self, model: Any, call: Callable[..., Any], form: str = "additive") -> None:
        config = getattr(model, "config", None)
        get_text_config = getattr(config, "get_text_config", None)
        config = get_text_config() if callable(get_text_config) else config
        n_layers = getattr(config, "num_hidden_layers", None)
        if not isinstance(n_layers, int):
            raise UnsupportedModelError(
                "model: expected a configuration with num_hidden_layers, received a "
                f"{type(model).__name__} without; its keys and values cannot be cached"
            )
        self.config: Any = config
        self._n_layers = n_layers
        self._call, self.form = call, form
        self._cache_argument = cache_argument(forward_parameters(model)) or OLD_CACHE
        weight = next(p for p in model.parameters() if p.dtype.is_floating_point)
        self.dtype, self.device = weight.dtype, weight.device

    def reserve(self, rows: int, cache_size: int) -> None:
        """Start an empty cache of `cache_size` indices in each of `rows` rows."""
        self._layout = KVCacheLayout(rows, cache_size, reports_past_only=True)
        self._cache = make_cache(self._n_layers, self._layout)

    @property
    def product_dtypes(self) -> set[torch.dtype]:
        """See `KVCacheLayout.product_dtypes`."""
        return self._layout.product_dtypes

    def run(
        self, tokens: Tensor, positions: Tensor, cache_indices: Tensor, reads: Tensor
    ) -> Tensor:
        """One pass.

        Args:
            tokens, positions, cache_indices: `[R, C]` int64.
            reads: `[R, 1, S]` or `[R, C, S]` bool, which of the first S cache indices an entry
                reads. An entry that reads nothing reads itself, so that its logits are no NaN.

        Returns:
            Logits `[R, C, V]`.
        """
        span = reads.shape[-1]
        self._layout.prepare(cache_indices, span)
        reads = reads.expand(-1, tokens.shape[1], -1)
        index = torch.arange(span, device=reads.device)
        reads = reads | (~reads.any(-1, keepdim=True) & (index == cache_indices[..., None]))
        out = self._call(
            tokens,
            attention_mask=make_form(reads, self.form, self.dtype),
            position_ids=positions,
            use_cache=True,
            **{self._cache_argument: self._cache},
        )
        logits: Tensor = out.logits
        return logits
