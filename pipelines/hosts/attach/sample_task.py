"""A call of transformers' `_sample` as a task: what a window decodes, and what comes back of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmaccel.pipelines.hosts.attach.prompt_pass import open_prompt
from mmaccel.pipelines.hosts.attach.step_outputs import StepOutputs
from mmaccel.pipelines.hosts.attach.streaming import TokenStreamer
from mmaccel.pipelines.hosts.causal_lm.family import CausalLM
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.generate_call import PER_LAYER, GenerateCall, Task, hand_over
from mmaccel.pipelines.hosts.layers.methods import LayerMethods
from mmaccel.pipelines.hosts.logits.processor_chain import LogitsChain, take_warpers
from mmaccel.pipelines.hosts.prompt_cuts.layers import PromptCuts
from mmaccel.pipelines.hosts.vision_language.visual_call import VisualCall
from mmaccel.results import Generation, Progress, Stats


def open_task(
    call: GenerateCall,
    family: CausalLM,
    visuals: VisualCall,
    methods: LayerMethods,
    seed: int | Sequence[int],
) -> Task:
    """The task of a call without obstacles."""
    samples = call.config.do_sample
    assert call.length is not None  # `find_obstacles` requires a limit
    rows = range(len(call.ids))
    seeds = [seed + row for row in rows] if isinstance(seed, int) else list(seed)
    reduced = visuals.apply(call, seeds)
    cuts = visuals.cuts
    prompt = family.prompt(reduced)
    kinds, warpers = take_warpers(reduced.kinds, samples)
    chain = LogitsChain(kinds, call.ids, prompt.tokens.shape[1]) if kinds else None
    window = family.open(reduced)
    if methods:
        window.use_methods(methods, prompt.branches)
    if cuts is not None and cuts.steps is not None:
        window.attention = "model"  # under masks of each step's own
    outputs = _prepare(reduced, window, family, cuts)
    streamer = None
    if reduced.needs_streamer:
        scores = outputs.scores if outputs is not None and "scores" in reduced.records else None
        streamer = TokenStreamer(call.ids, call.criteria, call.streamer, call.pad, scores)

    def on_step(progress: Progress) -> Tensor | None:
        ends = streamer(progress) if streamer is not None else None
        if chain is not None:
            lengths = progress.lengths
            chain.check(progress.previous, lengths if ends is None else lengths.minimum(ends))
        return ends

    def hand_on(made: Generation) -> Any:
        _describe(made.stats, call, window, visuals, methods)
        if call.streamer is not None:
            call.streamer.end()
        fields = {} if outputs is None else outputs.collect()
        if call.records & family.of_tokens:
            fields |= family.make_steps(call.model, made.tokens)
        return hand_over(call.ids, made, call.pad, call.config.return_dict_in_generate, fields)

    return Task(
        model=window,
        prompt=prompt,
        length=call.length,
        params=reduced.params({"processor": chain} | warpers),
        samples=samples,
        seed=seed,
        on_step=None if streamer is None and chain is None else on_step,
        prefill_chunk_size=call.config.prefill_chunk_size,
        hand_over=hand_on,
    )


def _prepare(
    call: GenerateCall, window: CausalLMWindow, family: CausalLM, layers: PromptCuts | None
) -> StepOutputs | None:
    """Let a window record what the call wants next to its tokens, and give it its prompt."""
    outputs = None
    names = call.records - family.of_tokens
    returns_cache = call.returns_cache and family.gives_cache
    if names or returns_cache:
        cache = call.cache if returns_cache else None
        dtype = torch.float32  # which transformers makes of logits, but of guidance's second ones
        if call.guidance is not None:
            dtype = torch.promote_types(dtype, call.model.dtype)
        outputs = StepOutputs(names, call.mask, call.pad, cache, dtype)
        window.setup.recorder = outputs
        window.pass_options = {n: True for n, kind in PER_LAYER.items() if kind in names}
        if "attentions" in names:
            window.attention = "model"  # the kernel has no weights to give out
    is_prefilled = bool(call.prompt_reasons) or layers is not None
    if not is_prefilled and returns_cache and call.guidance is None and family.takes_own_prompt:
        is_prefilled = not bool(call.mask.all())  # for the keys and values of padding
    if is_prefilled:
        window.own_prompt = open_prompt(call, outputs, layers, window.methods)
    return outputs


def _describe(
    stats: Stats,
    call: GenerateCall,
    window: CausalLMWindow,
    visuals: VisualCall,
    methods: LayerMethods,
) -> None:
    """Fill in the statistics what the model computed less of."""
    whole = "" if window.own_prompt is None else window.lack("own chunks")
    if whole and window.setup.prefill_chunk_size is not None:
        stats.notes.append(f"prefill_chunk_size: this prompt was processed whole: {whole}")
    parts = [visuals.describe()]
    visuals.record(stats)
    if visuals.reduction.methods and not call.others.get("mm_encoder_outputs"):
        stats.notes.append("visual_tokens: no image in the prompt, nothing to drop")
    if methods:
        methods.note(stats, window)
        parts.append(methods.describe(window))
    reference = "; ".join(filter(None, parts))
    if reference:
        stats.exactness = "relaxed"
        stats.reference = reference
