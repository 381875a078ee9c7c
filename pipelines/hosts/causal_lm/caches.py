"""The stores of one run of a causal LM, and where their entries come from beside its own passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmaccel.contracts import PrefixGroups
from mmaccel.pipelines.hosts.causal_lm.own_prompt import Cut, OwnPrompt, PromptStates
from mmaccel.pipelines.hosts.causal_lm.turning import open_turner
from mmaccel.pipelines.hosts.layers.shared_prefix import SharedPrefix
from mmaccel.pipelines.hosts.layers.store import KVCacheLayout, make_cache
from mmaccel.pipelines.hosts.layers.stores import LayerStores
from mmaccel.results import StepBytes

if TYPE_CHECKING:
    from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow


def open_stores(window: CausalLMWindow, rows: int, positions: int) -> LayerStores:
    windows = window.facts.windows
    methods = window.methods
    layout = KVCacheLayout(rows, positions + window.setup.spare + 1)
    turner = open_turner(window.model, windows) if methods.turns else None
    stores = LayerStores(
        make_cache(len(windows), layout).layers,
        layout,
        methods,
        window.branches,
        windows=windows,
        drafts=window.setup.drafts,
        turner=None if isinstance(turner, str) else turner,
        reads_back=window.reads_back,
    )
    if stores.numbers:  # of layers that drop entries; those that slide keep theirs
        whole = KVCacheLayout(layout.max_rows, layout.max_length)
        for layer, span in zip(stores.layers, windows, strict=True):
            layer.layout = layout if span is None else whole
    return stores


def take_prompt(stores: LayerStores, prompt: OwnPrompt, states: PromptStates) -> None:
    """Take over the keys and values that the model's own prefill has left."""
    _shorten(stores, prompt, [cut for cut in states.cuts if not cut.has_holes])
    index = prompt.cache_indices()  # [R, T]
    index_from = {cut.first: cut.cache_indices(prompt.mask) for cut in states.cuts}
    for number, (keys, values) in enumerate(states.layers):
        layer = stores.layers[number]
        index = index_from.get(number, index)
        layout = layer.layout
        first_column = index.shape[1] - keys.shape[2]  # a sliding layer has the last ones alone
        layout.prepare(index[:, first_column:], layout.max_length)
        layer.update(keys, values)
    stores.end_prompt(prompt.lengths, states.observer)


def _shorten(stores: LayerStores, prompt: OwnPrompt, cuts: Sequence[Cut]) -> None:
    """Give the layers behind each cut stores of their own length."""
    layers = list(stores.layers)
    ends = [*(cut.first for cut in cuts[1:]), len(layers)]
    for cut, end in zip(cuts, ends):
        shorter = stores.layout.shorten(prompt.lengths - cut.mask.sum(1))
        layers[cut.first : end] = make_cache(end - cut.first, shorter).layers
    stores.layers = layers


def share_prompts(stores: LayerStores, groups: PrefixGroups, prompts: LayerStores) -> None:
    """Let rows read together what the stores of one row a group hold, and store alone what follows;
    sliding layers store what they see too. Cost: a copy of the prompts, and a host synchronisation.
    """
    assert prompts.layout.indices is not None
    longest = max(groups.lengths)
    prefix = SharedPrefix(prompts.layout.indices.new_zeros(groups.n_rows))
    of_groups = [prompts.copy_row(group, 0, end) for group, end in enumerate(groups.lengths)]
    for group, (rows, entries) in enumerate(zip(groups.rows, of_groups, strict=True)):
        if groups.lengths[group] == 0:  # a prompt of one token leaves no entry
            continue
        for row in rows:
            prefix = prefix.join(row, group, [entries[layer] for layer in stores.numbers])
    stores.prefix = prefix
    ends = prefix.lengths
    room = stores.layout.max_length - longest
    stores.layers = make_cache(len(stores.layers), stores.layout.shorten(ends, room)).layers
    by_span: dict[int, KVCacheLayout] = {}
    for layer, span, number in zip(stores.layers, stores.windows, range(len(stores.layers))):
        if span is None:
            continue
        if span not in by_span:
            n_dropped = (ends - span).clamp(min=0)  # [R], of the prompt, which no window sees
            by_span[span] = stores.layout.shorten(n_dropped, room + min(span, longest))
            by_span[span].allocate()
        layer.layout = by_span[span]
        for rows, entries in zip(groups.rows, of_groups, strict=True):
            keys, values = (states[:, -span:] for states in entries[number])
            for row in rows:
                layer.write_row(row, keys, values)


def count_step_bytes(window: CausalLMWindow) -> StepBytes | None:
    n_held = 0 if window.caches is None else window.caches.whole_bytes
    if not n_held:
        return None
    model = window.model
    embeddings = {id(weight) for weight in model.get_input_embeddings().parameters()}
    weights = model.get_decoder().parameters()
    n_read = sum(weight.nbytes for weight in weights if id(weight) not in embeddings)
    if window.needs_head:
        head = sum(weight.nbytes for weight in model.get_output_embeddings().parameters())
        n_read += head * window.vocab_size // window.facts.n_ids
    return StepBytes(n_read, n_held)
