"""The stores of all layers in one run, and what the methods of layers do to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmaccel.pipelines.layers.attention import WindowPass
from mmaccel.pipelines.layers.eviction import Observer, evict
from mmaccel.pipelines.layers.methods import LayerMethods
from mmaccel.pipelines.layers.sparse import SparseBlocks
from mmaccel.pipelines.layers.store import KVCacheLayout, WindowLayer


class LayerStores:
    """The stores of a model's layers, which see all positions.

    Args:
        layers: one a layer; they share a layout until entries are evicted.
        methods: what is done to them.
        branches: G, guidance branches of the rows.

    Attributes:
        layers: see above.
        n_evicted: entries that were evicted, of those that there were, over all rows of a layer.
        sparse: chooses the blocks that passes attend to; None: all.
    """

    def __init__(
        self, layers: Sequence[WindowLayer], methods: LayerMethods, branches: int = 1
    ) -> None:
        self.layers = layers
        self.n_evicted = (0, 0)
        self._methods = methods
        self._branches = branches
        sparse = methods.attention
        self.sparse = None if sparse is None else SparseBlocks(sparse)

    @property
    def layouts(self) -> list[KVCacheLayout]:
        """The layouts of all layers, each once."""
        return list({id(layer.layout): layer.layout for layer in self.layers}.values())

    def open_pass(self, indices: Tensor, reads: Tensor | None = None, **fields: Any) -> WindowPass:
        """Prepare the stores for a pass.

        Args:
            indices: `[R, W]` int64, cache indices that it writes where nothing was evicted.
            reads: see `WindowPass`.
            fields: further fields of it.
        """
        for layout in self.layouts:
            visible = layout.max_length if reads is None else reads.shape[-1]
            layout.prepare(layout.to_index(indices), visible)
        windows = [None] * len(self.layers)
        return WindowPass(indices[:, 0], windows, self.layers, reads=reads, **fields)

    def observe(self, lengths: Tensor) -> Observer | None:
        """What looks at the pass over a prompt, of which each row has `lengths` `[R]` entries; None
        where nothing is evicted.
        """
        method = self._methods.kv_cache
        return None if method is None else Observer.of_last(lengths, method.observed)

    def keep_all(self, lengths: Tensor, begins: Tensor) -> None:
        """As `evict`, where nothing is evicted: cache indices before a row's first are given up."""
        layout = self.layers[0].layout
        shorter = layout.shorten(begins)
        index = torch.arange(layout.visible_length, device=lengths.device)
        keep = torch.where(index < lengths[:, None], index, -1)
        for layer in self.layers:
            layer.evict(keep, shorter)

    def evict(self, lengths: Tensor, observer: Observer, begins: Tensor | None = None) -> None:
        """Let every layer drop entries of the prompt that an observer has seen; see `evict`."""
        method = self._methods.kv_cache
        assert method is not None
        self.n_evicted = evict(
            method, self.layers, lengths, observer, self._branches, begins=begins
        )
