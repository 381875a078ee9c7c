"""The prompt of a `generate` call, processed by transformers' own prefill.

Source: `_prefill`, `prepare_inputs_for_generation` and `_update_model_kwargs_for_generation` of
`transformers.generation.utils.GenerationMixin`, 5.17 to 5.24.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from mmaccel.pipelines.attach.step_outputs import StepOutputs
from mmaccel.pipelines.causal_lm.compatibility import check_causal_lm, text_config
from mmaccel.pipelines.causal_lm.own_prompt import OwnPrompt, PromptStates, read_layers
from mmaccel.pipelines.generate_call import GenerateCall
from mmaccel.pipelines.layers.attention import watched
from mmaccel.pipelines.layers.methods import LayerMethods
from mmaccel.pipelines.layers.observing import Observer
from mmaccel.pipelines.layers.prompt_tiles import PromptTiles
from mmaccel.pipelines.layers.sparse import SparseBlocks
from mmaccel.pipelines.layers.store import number_served
from mmaccel.pipelines.prompt_cuts.layers import PromptCuts
from mmaccel.pipelines.transformers_release import CACHE


def open_prompt(
    call: GenerateCall,
    outputs: StepOutputs | None,
    layers: PromptCuts | None = None,
    methods: LayerMethods | None = None,
) -> OwnPrompt:
    """The prompt of a call, as a window takes it.

    Args:
        call: the call.
        outputs: gets the hidden states and attentions of the prompt; None where nobody asked.
        layers: drops tokens inside the language model; None where nobody asked.
        methods: of the layers' caches; None where there are none.
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
    if call.others.get("token_type_ids") is not None:  # as the last of the prompt
        inputs["token_type_ids"] = call.others["token_type_ids"][:, -1:].to(device)
    if call.others.get("mm_token_type_ids") is not None:  # text
        inputs["mm_token_type_ids"] = call.others["mm_token_type_ids"][:, -1:].to(device) * 0

    def process(sparse: SparseBlocks | None) -> PromptStates:
        """Process the prompt, of which a selector for prompts may choose the blocks."""
        others = dict(call.others)
        others.pop("tokenizer", None)  # stopping criteria have it
        cache = call.cache
        if not call.returns_cache:
            from transformers.cache_utils import DynamicCache

            cache = DynamicCache(config=text_config(call.model))  # dropped after this pass
        others |= {CACHE: cache, "use_cache": True}
        n_new = call.mask.numel() - call.mask.shape[0] * call.n_cached
        tiles = None
        if sparse is not None and sparse.method.chooses_prompts:
            tiles = PromptTiles(sparse, call.mask)
        if layers is not None:
            watching: AbstractContextManager[Any] = layers.cutting()
        else:
            watchers = [] if observer is None else [observer]
            served = number_served(check_causal_lm(call.model))
            watching = watched(call.model, watchers, tiles, served)
        with watching:
            output = call.model._prefill(call.ids, call.config, others)
        if outputs is not None:
            outputs.take_prompt(output, None if call.is_uncached else cache)
        return PromptStates(
            read_layers(cache),
            output.logits[:, -1],
            n_new,
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
    )
