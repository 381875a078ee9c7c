"""What in a `generate` call stands in the way of windows, in words that go into the statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mmaccel.pipelines.causal_lm_check import drops_cache, is_random, text_config
from mmaccel.pipelines.generate_call import GUIDANCE, GenerateCall
from mmaccel.pipelines.processor_kinds import is_own

_SERVED = {
    "attention_mask",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "tokenizer",  # has done its work in the stopping criteria
    "use_cache",
}
_RECORDS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def find_obstacles(call: GenerateCall, served: frozenset[str] = frozenset()) -> list[str]:
    """Why the call cannot be served; empty if it can.

    Args:
        call: the call.
        served: arguments meant for the model that its family heeds, beside the usual ones.
    """
    found = list(_find_in_arguments(call, served)) or list(_find_in_prompt(call))
    return list(dict.fromkeys([*found, *_find_in_lists(call)]))


def _find_in_arguments(call: GenerateCall, served: frozenset[str]) -> Iterator[str]:
    config, others = call.config, call.others
    if call.synced_gpus:
        yield "synced_gpus"
    if getattr(config, "is_assistant", False):
        yield "a model that drafts for another one"
    if config.return_dict_in_generate:
        yield from (name for name in _RECORDS if getattr(config, name, False))
    given = {name for name, value in others.items() if value is not None}
    if not others.get("mm_encoder_outputs"):  # no pictures in the prompt
        given.discard("mm_encoder_outputs")
    yield from sorted(given - _SERVED - served)
    cache = others.get("past_key_values")
    if cache is not None:
        if type(cache).__name__ not in ("DynamicCache", "StaticCache") or cache.offloading:
            yield f"a cache of its own kind ({type(cache).__name__})"
        elif getattr(cache, "_is_user_defined", False) or int(cache.get_seq_length()) > 0:
            yield "past_key_values given by the caller"
    yield from find_in_model(call.model)
    if call.ids.device != call.model.device:
        yield "token ids on another device than the model"


def find_in_model(model: Any) -> Iterator[str]:
    """What in a model's present state stands in the way of any call."""
    if is_random(model):
        yield "training mode with dropout"
    if drops_cache(model):
        yield "training mode with gradient checkpointing, which leaves the cache out"
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        yield "a model spread over several devices"


def _find_in_prompt(call: GenerateCall) -> Iterator[str]:
    if call.ids.ndim != 2 or call.ids.dtype != torch.int64 or call.ids.shape[1] < 1:
        yield "a prompt that is not token ids [B, T]"
        return
    mask, positions = call.mask, call.others.get("position_ids")
    if mask.shape != call.ids.shape or not is_left_padded(mask):
        yield "an attention mask that does more than hide padding on the left"
        return
    if positions is not None:
        expected = (mask.long().cumsum(-1) - 1)[mask]
        if positions.ndim != 2 or positions.shape[1] != mask.shape[1]:
            yield "position_ids of another shape"
        elif not torch.equal(positions.expand_as(mask)[mask], expected.to(positions.device)):
            yield "position_ids that are not counted from each row's first token"
    length, longest = call.length, call.ids.shape[1]
    if length is None or length < 1:
        yield "no limit on the number of tokens"
        return
    if call.guidance is not None:
        ids, unconditional = call.unconditional()
        if ids.shape[0] != call.ids.shape[0] or not is_left_padded(unconditional):
            yield "negative prompts that are not one per row, padded on the left"
            return
        if not bool(unconditional.all()) and not hasattr(
            text_config(call.model), "rope_parameters"
        ):
            yield "padded negative prompts for a model whose positions are absolute"
        longest = max(longest, ids.shape[1])
    limit = getattr(text_config(call.model), "max_position_embeddings", None)
    if limit is not None and longest + length - 1 > limit:
        yield f"more positions than the model's {limit}"


def _find_in_lists(call: GenerateCall) -> Iterator[str]:
    for name, given in (
        ("LogitsProcessorList", call.processors),
        ("StoppingCriteriaList", call.criteria),
    ):
        if type(given).__name__ != name:
            yield f"a {type(given).__name__} in place of a {name}"
            return
    guidance = call.guidance
    if guidance is not None and guidance.model is not call.model:
        yield "guidance by another model"
    if not any(is_own(processor, GUIDANCE) for processor in call.processors[1:]):
        yield from (kind for _, kind in call.kinds() if kind not in ("flat", "window", "prefix"))
    else:
        yield "guidance behind another processor"
    if call.pad is None and any(hasattr(c, "eos_token_id") for c in call.criteria):
        yield "an end token without a padding token"


def is_left_padded(mask: Tensor) -> bool:
    """`[B, T]` bool: False, then True up to the end, at least once."""
    return bool((mask[:, 1:] >= mask[:, :-1]).all()) and bool(mask[:, -1].all())
