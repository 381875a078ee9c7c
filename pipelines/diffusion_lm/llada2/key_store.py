"""Passes of a model over keys and values at places of their own, whatever masks it takes.

A pass computes some entries of every row, writes their keys and values to any places, and looks at
any places, under a mask of its own; the model is called as it is, with explicit positions and a
prepared 4-D mask. The cache is that of `mmaccel.pipelines.causal_lm.kv_cache`.

Source of the idea: the replaced positions of C. Wu et al., "Fast-dLLM", 2025, arXiv 2505.22618.

Departures: one store for all cache plans; the mask says what is read, never the store's length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.causal_lm.kv_cache import KVCacheLayout, make_cache
from mmaccel.pipelines.diffusion_lm.llada2.block_masks import make_form


class StoredCalls:
    """Passes of one model over a store.

    Args:
        model: for its configuration and dtype.
        call: runs it: ids `[R, C]` and options by name, as the model itself.
        form: of 4-D masks, see `mmaccel.pipelines.diffusion_lm.llada2.block_masks.BlockMasks`.

    Attributes:
        config: of the model's text.
        dtype, device: of the model's first parameter.
        positions: entries computed since it was made, over all rows.

    Raises:
        UnsupportedModelError: a model whose configuration names no layers.
    """

    def __init__(self, model: Any, call: Callable[..., Any], form: str = "additive") -> None:
        config = getattr(model, "config", None)
        inner = getattr(config, "get_text_config", None)
        config = inner() if callable(inner) else config
        n_layers = getattr(config, "num_hidden_layers", None)
        if not isinstance(n_layers, int):
            raise UnsupportedModelError(
                "model: expected a configuration with num_hidden_layers, received a "
                f"{type(model).__name__} without; its keys and values cannot be kept"
            )
        self.config: Any = config
        self._n_layers = n_layers
        self._call, self.form, self.positions = call, form, 0
        weight = next(p for p in model.parameters() if p.dtype.is_floating_point)
        self.dtype, self.device = weight.dtype, weight.device

    def reserve(self, rows: int, room: int) -> None:
        """Forget everything and make room for `room` places in each of `rows` rows."""
        self._kv_layout = KVCacheLayout(rows, room, reports_past_only=True)
        self._cache = make_cache(self._n_layers, self._kv_layout)

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
        self._kv_layout.prepare(places, span)
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
