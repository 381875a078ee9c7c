"""Why a causal LM cannot have what a part of a run needs, by the words of the glossary."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mmaccel.contracts import OF_LAYERS
from mmaccel.pipelines.hosts.causal_lm.compatibility import find_layer_sizes
from mmaccel.pipelines.hosts.causal_lm.self_check import find_layer_obstacle
from mmaccel.pipelines.hosts.causal_lm.turning import open_turner

if TYPE_CHECKING:
    from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow


def find_lack(window: CausalLMWindow, word: str, part: Any) -> str:
    """As `Capable.lack`. Cost: at a model's first time, a self-check of a few short passes."""
    prompt = window.own_prompt
    if prompt is not None:
        if word == "captured steps" and prompt.capture_obstacle:
            return prompt.capture_obstacle
        if word == "own chunks":
            return prompt.whole_reason
        if word in ("shared prompts", "copied entries", "draft canvas", "mixed passes"):
            return "its prompt is more than ids, and its own prefill processes it"
    if word == "shared prompts" and "output_attentions" in window.pass_options:
        return "attentions of all tokens are asked for"
    if word == "layer states":
        return window.lack_of_states()
    if word == "mixed passes":
        return _of_mixing(window)
    if word in OF_LAYERS - {"copied entries", "fused decoder"}:
        return _of_layers(window, word, part)
    return ""


def _of_mixing(window: CausalLMWindow) -> str:
    if window.setup.fused == "exact":
        return "fused='exact' has the bits of the model's own attention"
    if window.methods.quantizer is not None:
        return f"{window.methods.quantizer!r} holds entries of whole prompts"
    if window.pass_options:
        return f"the call asks for {', '.join(window.pass_options)}"
    return find_layer_obstacle(window)


def _of_layers(window: CausalLMWindow, word: str, part: Any) -> str:
    spans = window.facts.windows
    if None not in spans:
        return f"every layer sees the last {max(filter(None, spans))} positions alone"
    if word == "draft canvas":  # no model says what a layer that slides sees of a canvas
        for layer, span in enumerate(spans):
            if span is not None:
                return f"layer {layer} sees the last {span} positions alone"
    if word == "turned keys":
        turner = open_turner(window.model, spans)
        if isinstance(turner, str):
            return f"{turner}; leave rerotate out"
    if word == "hidden states":
        sizes = replace(find_layer_sizes(window.facts.config), depth=spans.count(None))
        if part.sizes not in (None, sizes):
            return f"it has {sizes}, and {part.name} is for {part.sizes}"
    return find_layer_obstacle(window)
