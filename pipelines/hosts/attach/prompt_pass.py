"""The prompt of a `generate` call, processed by transformers' own prefill, whole or in chunks.

A chunk is a prefill behind what the cache holds, with the features of its images' tokens. Images
that are seen in both directions (token types) are never divided.

Source: `_prefill`, `prepare_inputs_for_generation` and `_update_model_kwargs_for_generation` of
`transformers.generation.utils.GenerationMixin`, 5.17 to 5.24.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.pipelines.hosts.attach.step_outputs import StepOutputs
from mmaccel.pipelines.hosts.causal_lm.compatibility import find_facts, text_config
from mmaccel.pipelines.hosts.causal_lm.own_prompt import OwnPrompt, PromptStates, read_layers
from mmaccel.pipelines.hosts.generate_call import PER_LAYER, GenerateCall
from mmaccel.pipelines.hosts.layers.attention_function import watched
from mmaccel.pipelines.hosts.layers.methods import LayerMethods
from mmaccel.pipelines.hosts.layers.observing import Observer
from mmaccel.pipelines.hosts.layers.prompt_tiles import PromptTiles
from mmaccel.pipelines.hosts.layers.sparse import SparseBlocks
from mmaccel.pipelines.hosts.layers.store import number_served
from mmaccel.pipelines.hosts.prompt_cuts.layers import PromptCuts
from mmaccel.pipelines.hosts.transformers_release import CACHE
from mmaccel.pipelines.hosts.vision_language.columns import take_features
from mmaccel.pipelines.hosts.vision_language.visuals import find_placeholder


@dataclass(frozen=True)
class Prefill:
    """The columns of a call's prompt that no cache holds, as the model's own prefill takes them."""

    call: GenerateCall
    others: dict[str, Any]

    @property
    def n_new(self) -> int:
        return self.call.n_columns - self.call.n_cached

    def run(self, size: int | None) -> tuple[Any, int]:
        """The output of the last pass, and how many there were. A pass processes `size` tokens at
        most, of all rows together, but one of each at least; None: all.
        """
        call = self.call
        columns = self.n_new if size is None else max(1, size // len(call.mask))
        if columns >= self.n_new:
            return call.model._prefill(call.ids, call.whole_config, self.others), 1
        first = call.n_cached
        output = None
        ends = self._find_ends(columns)
        for end in ends:
            ids, others = self._take(first, end)
            output = None  # before the next one is made
            output = call.model._prefill(ids, call.whole_config, others)
            first = end
        return output, len(ends)

    def _find_ends(self, columns: int) -> list[int]:
        """The column behind each chunk of so many at most, or of one image."""
        call = self.call
        may_end = torch.ones(call.n_columns + 1, dtype=torch.bool)  # in front of column i
        types = self.others.get("token_type_ids")
        if types is not None:
            # an image goes on where two columns have the same type, and not that of text
            goes_on = (types[:, 1:] == types[:, :-1]) & (types[:, 1:] != 0)
            may_end[call.n_columns + 1 - types.shape[1] : -1] = ~goes_on.any(0).cpu()
        boundaries = may_end.nonzero()[:, 0]
        ends = [call.n_cached]
        while ends[-1] < call.n_columns:
            later = boundaries[boundaries > ends[-1]]
            near = later[later <= ends[-1] + columns]
            ends.append(int(near[-1] if len(near) else later[0]))
        return ends[1:]

    def _take(self, first: int, end: int) -> tuple[Tensor, dict[str, Any]]:
        """Ids, and arguments of the forward, for the columns from `first` on, before `end`."""
        call = self.call
        others = dict(self.others)
        new = call.ids[:, -self.n_new :]
        taken = slice(first - call.n_cached, end - call.n_cached)
        n_left = call.n_columns - end
        others["attention_mask"] = call.mask[:, :end].long()
        for name in ("token_type_ids", "mm_token_type_ids", "inputs_embeds"):
            values = others.get(name)
            if values is not None:
                others[name] = values[:, : values.shape[1] - n_left]
        if others.get("position_ids") is not None:
            others["position_ids"] = others["position_ids"][..., -self.n_new :][..., taken]
        encoded = others.pop("mm_encoder_outputs", None)
        if encoded:
            is_taken = torch.zeros_like(new, dtype=torch.bool)
            is_taken[:, taken] = True
            others["mm_encoder_outputs"] = {
                modality: take_features(call.model, modality, output, new, is_taken)
                for modality, output in encoded.items()
                if bool((new[:, taken] == find_placeholder(call.model, modality)).any())
            }
        return new[:, taken], others


def _find_whole(call: GenerateCall, layers: PromptCuts | None, methods: LayerMethods | None) -> str:
    """Why a prompt is processed whole; empty where it may come in chunks."""
    if layers is not None:
        return "tokens leave it inside the language model"
    if methods is not None and methods.evictor is not None:
        return f"{methods.evictor!r} looks at it whole"
    if call.records & set(PER_LAYER.values()):
        return f"the call asks for {', '.join(sorted(call.records & set(PER_LAYER.values())))}"
    if any(call.others.get(name) is not None for name in ("pixel_values", "pixel_values_videos")):
        return f"a {type(call.model).__name__} encodes images in its first pass"
    return ""


def open_prompt(
    call: GenerateCall,
    outputs: StepOutputs | None,
    layers: PromptCuts | None = None,
    methods: LayerMethods | None = None,
) -> OwnPrompt:
    """The prompt of a call, as a window takes it.

    Args:
        outputs: gets the hidden states and attentions of the prompt.
        layers: drops tokens inside the language model.
        methods: of the layers' caches.
    """
    device = call.device
    mask = call.mask.to(device)
    next_position: Tensor = mask.sum(1)
    if call.positions is not None:  # on a grid: the same in all coordinates after the prompt
        last = call.positions[..., -1].to(device)
        next_position = (last[0] if last.ndim == 2 else last).expand(len(mask)) + 1
    observer = None
    if methods is not None and methods.evictor is not None:
        columns = (~mask).long().argsort(dim=1, stable=True)  # that each row attends to, first
        observer = Observer(methods.evictor, mask.sum(1), columns)
    inputs = dict[str, Tensor]()  # of every generated token, `[B, 1]` each
    for name in ("token_type_ids", "mm_token_type_ids"):
        if call.others.get(name) is not None:  # as the last of the prompt, and text
            last = call.others[name][:, -1:].to(device)
            inputs[name] = last if name == "token_type_ids" else last * 0
    whole_reason = _find_whole(call, layers, methods)

    def process(sparse: SparseBlocks | None, size: int | None) -> PromptStates:
        """Process the prompt, of which a selector for prompts may choose the blocks."""
        others = dict(call.others)
        others.pop("tokenizer", None)  # stopping criteria have it
        cache = call.cache
        if not call.returns_cache:
            from transformers.cache_utils import DynamicCache

            cache = DynamicCache(config=text_config(call.model))  # dropped after this pass
        others |= {CACHE: cache, "use_cache": True}
        tiles = None
        if sparse is not None and sparse.method.chooses_prompts:
            tiles = PromptTiles(sparse, call.mask)
        if layers is not None:
            watching: AbstractContextManager[Any] = layers.cutting()
        else:
            watchers = [] if observer is None else [observer]
            served = number_served(find_facts(call.model).windows)
            watching = watched(call.model, watchers, tiles, served)
        with watching:
            prefill = Prefill(call, others)
            output, n_passes = prefill.run(None if whole_reason else size)
        if outputs is not None:
            outputs.take_prompt(output, None if call.is_uncached else cache)
        return PromptStates(
            read_layers(cache),
            output.logits[:, -1],
            prefill.n_new * len(call.mask),
            n_passes,
            () if layers is None else layers.cuts,
            None if layers is None else layers.steps,
            observer,
        )

    return OwnPrompt(
        mask,
        next_position,
        process,
        inputs=inputs,
        is_cut=layers is not None,
        has_steps=layers is not None and layers.steps is not None,
        whole_reason=whole_reason,
    )
