"""Arguments of other loops that a `generate` call of a denoiser does not take, and why.

The published loops of these models have their schedule in their arguments; here it is the
policy's. transformers has arguments that need a prefix; a canvas is filled in any order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from mmaccel.errors import OptionError

_SCHEDULE = {  # argument -> (field of a policy, a policy that surely has it; None: every one)
    "block_length": ("block", None),
    "block_size": ("block", None),
    "small_block_size": ("block", None),
    "use_cache": ("cache", None),
    "use_block_cache": ("cache", None),
    "dual_cache": ("cache", None),
    "threshold": ("threshold", "ConfidentParallel"),
    "factor": ("factor", "ConfidentParallel"),
    "alg_temp": ("choice", "MaskedParallel"),
    "steps": ("steps", "MaskedParallel"),
}
_PREFIX = "a canvas is filled in any order, and has no prefix that it could look at"
_REASONS = {
    "remasking": "the policy is the rule; attach another one",
    "alg": "the policy is the rule; attach another one",
    "eps": "the policy chooses how many slots a pass fills; leave it out",
    "mask_id": "it belongs to the denoiser; attach to one made with mask_token=",
    "mask_token_id": "it belongs to the denoiser; attach to one made with mask_token=",
    "cfg_scale": "its unconditional rows are prompts of mask tokens, which a run takes for slots "
    "that nobody filled; give guidance_scale= (1 more than this) and negative_prompt_ids=",
    "guidance_scale": "give it to the call, with negative_prompt_ids=",
    "num_beams": "one canvas a row is filled; leave it out",
    "num_return_sequences": "one canvas a row is filled; repeat the rows of input_ids",
    "repetition_penalty": _PREFIX + "; leave it out",
    "logits_processor": _PREFIX + "; give attach a layout=",
    "prefix_allowed_tokens_fn": _PREFIX + "; give attach a layout=",
    "stopping_criteria": _PREFIX + "; give eos_token_id",
    "stop_strings": _PREFIX + "; give eos_token_id",
    "tokenizer": "nothing asks for it; leave it out",
    "streamer": "a canvas is filled in any order; look at the tokens when they are all there",
    "output_history": "no canvas but the last is kept; call policy.sample with on_step=",
    "output_scores": "scores belong to passes, and slots to several; call policy.sample",
    "output_logits": "scores belong to passes, and slots to several; call policy.sample",
    "generation_tokens_hook_func": "tokens are the policy's; call policy.sample with on_step=",
    "generation_logits_hook_func": "scores are the policy's; give attach a layout=",
}
_NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0}
_NEUTRAL |= {"guidance_scale": 1.0, "cfg_scale": 0.0, "use_cache": True}
_NATIVE = ("num_beams", "num_return_sequences", "repetition_penalty", "guidance_scale")


def check_others(others: Mapping[str, Any], policy: Any) -> None:
    """Refuse arguments beyond those a call takes; None, False and what changes nothing pass.

    Raises:
        OptionError: an argument of another loop, with what takes its place.
        TypeError: one that nobody knows.
    """
    for name, value in others.items():
        if name not in _SCHEDULE and name not in _REASONS:
            raise TypeError(f"generate() got an unexpected keyword argument {name!r}")
        if not _is_neutral(name, value):
            raise OptionError(
                f"{name}: expected none under {type(policy).__name__}, received {value!r}; "
                f"{_find_remedy(name, policy)}"
            )


def check_config(config: Any, policy: Any) -> None:
    """Refuse a `GenerationConfig` of a call that asks for what a canvas has not, or none.

    Raises:
        OptionError: with what takes its place.
    """
    is_config = hasattr(config, "__dict__") and not isinstance(config, Mapping | Tensor)
    if config is not None and not is_config:
        raise OptionError(
            f"generation_config: expected a GenerationConfig, received a {type(config).__name__}; "
            "give GenerationConfig(...), or its options to the call"
        )
    check_others({name: getattr(config, name, None) for name in _NATIVE}, policy)


def find_left_out(config: Any) -> list[str]:
    """Notes on what a model's own `GenerationConfig` asks for and a canvas has not."""
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
