"""LayerCaches: the layers' stores of one run, and what their layers know of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmaccel.errors import ShapeError
from mmaccel.pipelines.causal_lm.own_prompt import Cut, LayerSteps, OwnPrompt, PromptStates
from mmaccel.pipelines.layers.attention import Choices, Watcher, WindowPass
from mmaccel.pipelines.layers.eviction import Observer, evict
from mmaccel.pipelines.layers.methods import LayerMethods
from mmaccel.pipelines.layers.sparse import SparseBlocks
from mmaccel.pipelines.layers.store import KVCacheLayout, WindowLayer, make_cache
from mmaccel.pipelines.runner.fused_decoder import Tables


class LayerCaches:
    """The caches of all layers for R rows; they are made at each `reserve`.

    Args:
        rows: R.
        positions: of each row.
        windows: sliding window of every layer, in positions; None where it sees everything.
        methods: what is done to the caches and the attention of the layers.
        spare: cache indices a row beside those of positions.
        branches: G, guidance branches of the rows.
        tables: angles of the fused decoder for the positions; None: it computes them itself.

    Attributes:
        positions: of each row; passes may go beyond, and what they write there is lost.
        layout: of layers of which nothing was cut or evicted.
        cache: the layers as transformers' `Cache`.
        is_cut: whether layers hold fewer entries than others.
        n_evicted: entries that the eviction dropped, and entries that there were, over all rows of
            a layer; (0, 0) before.
        steps: what passes after the prompt's do in their layers; None: nothing.
    """

    def __init__(
        self,
        rows: int,
        positions: int,
        windows: Sequence[int | None],
        methods: LayerMethods,
        *,
        spare: int,
        branches: int,
        tables: Tables | None,
    ) -> None:
        self.positions = positions
        self.tables = tables
        self.layout = KVCacheLayout(rows, positions + spare + 1)
        self.cache: Any = make_cache(len(windows), self.layout)
        self.is_cut = False
        self.n_evicted = (0, 0)
        self._windows = windows
        self._methods = methods
        self._branches = branches
        self._sparse = None if methods.attention is None else SparseBlocks(methods.attention)
        self.steps: LayerSteps | None = None

    @property
    def layers(self) -> list[WindowLayer]:
        """Of each layer, its store."""
        found: list[WindowLayer] = self.cache.layers
        return found

    def prepare(self, tokens: Tensor, start: Tensor, stride: int | None) -> Tensor:
        """Prepare all layers for a pass.

        Args:
            tokens: `[R, W]` of the pass.
            start: `[R]` int64.
            stride: the attended length is rounded up to a multiple of it; None: all is attended to.

        Returns:
            `[R, W]` int64, positions of the tokens.

        Raises:
            ShapeError: another number of rows than reserved.
        """
        if tokens.shape[0] != self.layout.rows:
            raise ShapeError(
                f"tokens: expected {self.layout.rows} rows as reserved, received "
                f"{list(tokens.shape)}; call reserve(rows, positions)"
            )
        width = tokens.shape[1]
        positions = start[:, None] + torch.arange(width, device=start.device)
        layouts = {id(layer.layout): layer.layout for layer in self.cache.layers}
        for layout in layouts.values() or [self.layout]:
            visible = layout.max_length
            if stride is not None:
                end = int(layout.to_index(start).max()) + width
                visible = -(-end // stride) * stride
            layout.prepare(layout.to_index(positions), visible)
        return positions

    def open_pass(
        self,
        start: Tensor,
        *,
        by_kernel: bool,
        choices: Choices | None,
        watcher: Watcher | None = None,
        tree: Tensor | None = None,
    ) -> WindowPass | None:
        """What the layers need to know of a pass, see `WindowPass`; None where they attend by
        themselves, under masks.
        """
        has_methods = self.is_cut or self._sparse is not None
        is_plain = not by_kernel and not has_methods and watcher is None and tree is None
        if is_plain or self.steps is not None:
            return None
        return WindowPass(
            start, self._windows, self.layers, by_kernel=by_kernel, choices=choices,
            sparse=self._sparse, watcher=watcher, tree=tree,
        )  # fmt: skip

    def read(self, index: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values `[B, H, N, D]` of every layer at cache indices `[B, N]` of B rows.

        Zeros at negative indices.
        """
        return [layer.read(index) for layer in self.layers]

    def take(self, own: OwnPrompt, states: PromptStates) -> None:
        """Take over the keys and values that the model's own prefill has left."""
        self.steps = states.steps
        self._shorten(own, [cut for cut in states.cuts if not cut.has_holes])
        index = own.cache_indices()
        indices = {cut.first: cut.cache_indices(own.mask) for cut in states.cuts}
        for number, (keys, values) in enumerate(states.layers):
            layer = self.layers[number]
            index = indices.get(number, index)
            layout = layer.layout
            layout.prepare(index[:, index.shape[1] - keys.shape[2] :], layout.max_length)
            layer.update(keys, values)
        if states.observer is not None:
            self.evict(own.lengths, states.observer)

    def _shorten(self, own: OwnPrompt, cuts: Sequence[Cut]) -> None:
        """Give the layers after each cut caches of their own length."""
        layers = self.layers
        ends = [*(cut.first for cut in cuts[1:]), len(layers)]
        self.is_cut = bool(cuts)
        for cut, end in zip(cuts, ends):
            shorter = self.layout.shorten(own.lengths - cut.mask.sum(1))
            layers[cut.first : end] = make_cache(end - cut.first, shorter).layers

    def evict(self, lengths: Tensor, observer: Observer) -> None:
        """Let every layer drop entries of the prompt, of which each row has `lengths` `[R]`."""
        method = self._methods.kv_cache
        assert method is not None
        self.n_evicted = evict(method, self.layers, lengths, observer, self._branches)
        self.is_cut |= self.n_evicted[0] > 0
