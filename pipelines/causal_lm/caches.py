"""LayerCaches: the layers' stores of one run of a causal LM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from mmaccel.contracts import PrefixGroups
from mmaccel.pipelines.causal_lm.own_prompt import Cut, OwnPrompt, PromptStates
from mmaccel.pipelines.layers.methods import LayerMethods
from mmaccel.pipelines.layers.shared_prefix import SharedPrefix
from mmaccel.pipelines.layers.store import KVCacheLayout, make_cache
from mmaccel.pipelines.layers.stores import LayerStores
from mmaccel.pipelines.runner.fused_decoder import Tables

if TYPE_CHECKING:
    from mmaccel.pipelines.causal_lm.turning import KeyTurner
    from mmaccel.pipelines.prompt_cuts.revival import RevivingCuts
    from mmaccel.samplers.drafting.self_draft import SelfDrafting


class LayerCaches(LayerStores):
    """The stores of all layers, which may begin with what the model's own prefill has left.

    Args:
        layout: of R rows.
        windows, methods, branches, drafts, turner: see `LayerStores`.
        positions: of each row; passes may go beyond, and what they write there is lost.
        tables: angles of the fused decoder for the positions; None: it computes them itself.

    Attributes:
        positions, tables: see above.
        cache: the layers as transformers' `Cache`.
        steps: what passes after the prompt's do in their layers; None: nothing.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        windows: Sequence[int | None],
        methods: LayerMethods,
        *,
        branches: int,
        drafts: SelfDrafting | None,
        positions: int,
        tables: Tables | None,
        turner: KeyTurner | None,
    ) -> None:
        self.cache: Any = make_cache(len(windows), layout)
        super().__init__(
            self.cache.layers, layout, methods, branches, windows=windows, drafts=drafts,
            turner=turner,
        )  # fmt: skip
        if self.numbers:  # what others drop stays in those that slide
            whole = KVCacheLayout(layout.max_rows, layout.max_length)
            for layer, span in zip(self.layers, windows, strict=True):
                layer.layout = layout if span is None else whole
        self.positions = positions
        self.tables = tables
        self.steps: RevivingCuts | None = None

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
        self.end_prompt(own.lengths, states.observer)

    def share(self, groups: PrefixGroups, prompts: LayerCaches) -> None:
        """Let rows read together what other caches hold, and store what follows it alone; a layer
        with a sliding window stores what it sees of the prompts too.

        Args:
            prompts: the caches, of one row a group.

        Cost: a copy of the prompts, and a host synchronisation.
        """
        assert prompts.layout.indices is not None
        longest = max(groups.lengths)
        lengths = prompts.layout.indices.new_tensor(groups.lengths)
        index = torch.arange(longest, device=lengths.device)
        index = torch.where(index < lengths[:, None], index, -1)
        found = prompts.read(index)
        shared = [found[layer] for layer in self.numbers]
        self.prefix = SharedPrefix.of_groups(groups, lengths, shared)
        ends = self.prefix.lengths
        shorter = self.layout.shorten(ends, self.layout.max_length - longest)
        self.cache.layers[:] = make_cache(len(self.layers), shorter).layers
        by_span: dict[int, KVCacheLayout] = {}
        for layer, span, (keys, values) in zip(self.layers, self.windows, found, strict=True):
            if span is None:
                continue
            if span not in by_span:
                room = self.layout.max_length - longest + min(span, longest)
                by_span[span] = self.layout.shorten((ends - span).clamp(min=0), room)
                by_span[span].allocate()
            layer.layout = by_span[span]
            for group, rows in enumerate(groups.rows):
                end = groups.lengths[group]
                own = slice(max(end - span, 0), end)
                for row in rows:
                    layer.write_row(row, keys[group, :, own], values[group, :, own])

    def _shorten(self, own: OwnPrompt, cuts: Sequence[Cut]) -> None:
        """Give the layers after each cut caches of their own length."""
        layers = self.cache.layers
        ends = [*(cut.first for cut in cuts[1:]), len(layers)]
        for cut, end in zip(cuts, ends):
            shorter = self.layout.shorten(own.lengths - cut.mask.sum(1))
            layers[cut.first : end] = make_cache(end - cut.first, shorter).layers
