"""LayerCaches: the layers' stores of one run of a causal LM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
        windows, methods, branches, drafts, turner, reads_back: see `LayerStores`.
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
        reads_back: bool,
    ) -> None:
        self.cache: Any = make_cache(len(windows), layout)
        super().__init__(
            self.cache.layers, layout, methods, branches, windows=windows, drafts=drafts,
            turner=turner, reads_back=reads_back,
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
        prefix = SharedPrefix(prompts.layout.indices.new_zeros(groups.n_rows))
        found = [prompts.copy_row(group, 0, end) for group, end in enumerate(groups.lengths)]
        for group, (rows, entries) in enumerate(zip(groups.rows, found, strict=True)):
            for row in rows if groups.lengths[group] else ():  # a prompt of one token has none
                prefix = prefix.join(row, group, [entries[layer] for layer in self.numbers])
        self.prefix = prefix
        ends = prefix.lengths
        shorter = self.layout.shorten(ends, self.layout.max_length - longest)
        self.cache.layers[:] = make_cache(len(self.layers), shorter).layers
        by_span: dict[int, KVCacheLayout] = {}
        for number, span in enumerate(self.windows):
            if span is None:
                continue
            if span not in by_span:
                room = self.layout.max_length - longest + min(span, longest)
                by_span[span] = self.layout.shorten((ends - span).clamp(min=0), room)
                by_span[span].allocate()
            layer = self.layers[number]
            layer.layout = by_span[span]
            for rows, entries in zip(groups.rows, found, strict=True):
                keys, values = (states[:, -span:] for states in entries[number])
                for row in rows:
                    layer.write_row(row, keys, values)

    def _shorten(self, own: OwnPrompt, cuts: Sequence[Cut]) -> None:
        """Give the layers after each cut caches of their own length."""
        layers = self.cache.layers
        ends = [*(cut.first for cut in cuts[1:]), len(layers)]
        for cut, end in zip(cuts, ends):
            shorter = self.layout.shorten(own.lengths - cut.mask.sum(1))
            layers[cut.first : end] = make_cache(end - cut.first, shorter).layers
