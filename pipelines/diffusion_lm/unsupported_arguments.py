"""Arguments of other loops that a denoiser's `generate` and diffusers' pipelines refuse, and why.

The published loops of these models take their schedule as arguments; here the schedule belongs to
the policy. Some arguments of transformers need a prefix; a canvas is filled in any order. What a
pipeline's own scheduler reads is a table here; all other arguments mean what they always do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from mmaccel.errors import OptionError
from mmaccel.samplers.canvas.masked_parallel import set_steps

_SCHEDULE = {  # argument -> (field of a policy, a policy with that field; None: every policy)
    "block_length": ("block", None),
    "block_size": ("block", None),
    "small_block_size": ("block", None),
    "use_cache": ("cache", None),
    "use_block_cache": ("cache", None),
    "dual_cache": ("cache", None),
    "threshold": ("threshold", "ConfidentParallel"),
    "factor": ("factor", "ConfidentParallel"),
    "alg_temp": ("choice", "MaskedParallel"),
    "temperature": ("choice", "MaskedParallel"),
    "steps": ("steps", "MaskedParallel"),
}
OWN_SCHEDULES = {  # pipeline of diffusers -> arguments of its own scheduler
    "AmusedPipeline": ("num_inference_steps", "temperature"),
    "LLaDA2Pipeline": (
        "num_inference_steps",
        "threshold",
        "editing_threshold",
        "max_post_steps",
        "minimal_topk",
    ),
    "DiffusionGemmaPipeline": ("stability_threshold", "confidence_threshold"),
}
_PREFIX = "a canvas is filled in any order and has no prefix"
_REASONS = {
    "remasking": "the policy is the rule; attach another one",
    "alg": "the policy is the rule; attach another one",
    "eps": "the policy chooses how many slots a pass fills; leave it out",
    "minimal_topk": "the policy chooses how many slots a pass fills; leave it out",
    "editing_threshold": "what is committed stays; leave it out, or attach CachedBlocks()",
    "max_post_steps": "what is committed stays; leave it out, or attach CachedBlocks()",
    "confidence_threshold": "the policy fills a canvas to its end; leave it out",
    "stability_threshold": "the policy fills a canvas to its end; leave it out",
    "mask_id": "it belongs to the denoiser; attach to one built with mask_token=",
    "mask_token_id": "it belongs to the denoiser; attach to one built with mask_token=",
    "cfg_scale": "its unconditional rows are prompts of mask tokens, which a run takes for open "
    "slots; give guidance_scale= (1 more than this) and negative_prompt_ids=",
    "guidance_scale": "give it to the call, with negative_prompt_ids=",
    "num_beams": "one canvas a row is filled; leave it out",
    "num_return_sequences": "one canvas a row is filled; repeat the rows of input_ids",
    "repetition_penalty": _PREFIX + "; leave it out",
    "logits_processor": _PREFIX + "; give attach a layout=",
    "prefix_allowed_tokens_fn": _PREFIX + "; give attach a layout=",
    "stopping_criteria": _PREFIX + "; give eos_token_id",
    "stop_strings": _PREFIX + "; give eos_token_id",
    "tokenizer": "it is not used; leave it out",
    "streamer": "a canvas is filled in any order; read the tokens when the call returns",
    "output_history": "only the last canvas is returned; call policy.sample with on_step=",
    "output_scores": "scores belong to passes, and slots to several; call policy.sample",
    "output_logits": "scores belong to passes, and slots to several; call policy.sample",
    "generation_tokens_hook_func": "tokens are the policy's; call policy.sample with on_step=",
    "generation_logits_hook_func": "scores are the policy's; give attach a layout=",
}
_NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0}
_NEUTRAL |= {"guidance_scale": 1.0, "cfg_scale": 0.0, "use_cache": True}
_NEUTRAL |= {"editing_threshold": 0.0, "minimal_topk": 1}
_NATIVE = ("num_beams", "num_return_sequences", "repetition_penalty", "guidance_scale")


def check_others(others: Mapping[str, Any], policy: Any) -> None:
    """Refuse arguments that a call does not take; None, False and neutral values pass.

    Raises:
        OptionError: an argument of another loop, with what to use instead.
        TypeError: an unknown argument.
    """
    for name, value in others.items():
        if name not in _SCHEDULE and name not in _REASONS:
            raise TypeError(f"generate() got an unexpected keyword argument {name!r}")
        if not _is_neutral(name, value):
            raise OptionError(
                f"{name}: expected none under {type(policy).__name__}, received {value!r}; "
                f"{_find_remedy(name, policy)}"
            )


def read_schedule(pipeline: str, asked: Mapping[str, Any], policy: Any) -> Any:
    """The policy of a call of a diffusers pipeline, with the call's `num_inference_steps`.

    Args:
        pipeline: name in `OWN_SCHEDULES`.
        asked: what the caller gave, by name.
        policy: attached.

    Raises:
        OptionError: an argument that nothing would read.
    """
    given = {name: asked[name] for name in OWN_SCHEDULES[pipeline] if name in asked}
    steps = given.pop("num_inference_steps", None)
    check_others(given, policy)
    return policy if steps is None else set_steps(policy, steps)


def check_config(config: Any, policy: Any) -> None:
    """Refuse a call's `GenerationConfig` with options that a canvas cannot follow; None passes.

    Raises:
        OptionError: with what to use instead, or for another object than a configuration.
    """
    is_config = hasattr(config, "__dict__") and not isinstance(config, Mapping | Tensor)
    if config is not None and not is_config:
        raise OptionError(
            f"generation_config: expected a GenerationConfig, received a {type(config).__name__}; "
            "give GenerationConfig(...), or its options to the call"
        )
    check_others({name: getattr(config, name, None) for name in _NATIVE}, policy)


def find_left_out(config: Any) -> list[str]:
    """Notes on options of a model's own `GenerationConfig` that a canvas cannot follow."""
    found = {name: getattr(config, name, None) for name in _NATIVE}
    return [
        f"{name} {value} of the model's generation_config was left out"
        for name, value in found.items()
        if not _is_neutral(name, value)
    ]


def _is_neutral(name: str, value: Any) -> bool:
    if value is None or value is False:
        return True
    return isinstance(value, int | float) and name in _NEUTRAL and value == _NEUTRAL[name]


def _find_remedy(name: str, policy: Any) -> str:
    if name not in _SCHEDULE:
        return _REASONS[name]
    wanted, owner = _SCHEDULE[name]
    own = type(policy).__name__
    if owner not in (None, own):
        return f"the policy has the schedule, attach {owner}({wanted}=) for this one"
    if is_dataclass(policy) and wanted not in [f.name for f in fields(policy)]:
        return "the policy has the schedule; leave it out"
    return f"the policy has the schedule, attach {own}({wanted}=)"
