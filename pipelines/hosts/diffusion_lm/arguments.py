"""What becomes of each argument of a denoiser's `generate` and of diffusers' pipelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mmaccel.errors import OptionError
from mmaccel.pipelines.hosts.generate_call import IGNORED, READ, Argument, Table, refuse_arguments
from mmaccel.samplers.canvas.masked_parallel import set_steps


def _refused(remedy: str, neutral: Any = False) -> Argument:
    return Argument("refuse", remedy, neutral)


_FIELD = "the policy has the schedule, attach "
_RULE = _refused("the policy is the rule; attach another one")
_COUNT = "the policy chooses how many slots a pass fills; leave it out"
_STAYS = "what is committed stays; leave it out, or attach CachedBlocks()"
_WHOLE = _refused("the policy fills a canvas to its end; leave it out")
_MASK = _refused("it belongs to the denoiser; attach to one built with mask_token=")
_ROWS = "one canvas a row is filled; "
_PREFIX = "a canvas is filled in any order and has no prefix"
_SCORES = _refused("scores belong to passes, and slots to several; call policy.sample")
DENOISER: Table = {
    "block_length": _refused(_FIELD + "{policy}(block=)"),
    "block_size": _refused(_FIELD + "{policy}(block=)"),
    "small_block_size": _refused(_FIELD + "{policy}(block=)"),
    "use_cache": IGNORED,
    "use_block_cache": _refused(_FIELD + "{policy}(cache=)"),
    "dual_cache": _refused(_FIELD + "{policy}(cache=)"),
    "threshold": _refused(_FIELD + "ConfidentParallel(threshold=)"),
    "factor": _refused(_FIELD + "ConfidentParallel(factor=)"),
    "alg_temp": _refused(_FIELD + "MaskedParallel(choice=)"),
    "temperature": _refused(_FIELD + "MaskedParallel(choice=)"),
    "steps": _refused(_FIELD + "MaskedParallel(steps=)"),
    "remasking": _RULE,
    "alg": _RULE,
    "eps": _refused(_COUNT),
    "minimal_topk": _refused(_COUNT, 1),
    "editing_threshold": _refused(_STAYS, 0.0),
    "max_post_steps": _refused(_STAYS),
    "confidence_threshold": _WHOLE,
    "stability_threshold": _WHOLE,
    "mask_id": _MASK,
    "mask_token_id": _MASK,
    "cfg_scale": _refused(
        "its unconditional rows are prompts of mask tokens, which a run takes for open "
        "slots; give guidance_scale= (1 more than this) and negative_prompt_ids=",
        0.0,
    ),
    "guidance_scale": _refused("give it to the call, with negative_prompt_ids=", 1.0),
    "num_beams": _refused(_ROWS + "leave it out", 1),
    "num_return_sequences": _refused(_ROWS + "repeat the rows of input_ids", 1),
    "repetition_penalty": _refused(_PREFIX + "; leave it out", 1.0),
    "logits_processor": _refused(_PREFIX + "; give attach a layout="),
    "prefix_allowed_tokens_fn": _refused(_PREFIX + "; give attach a layout="),
    "stopping_criteria": _refused(_PREFIX + "; give eos_token_id"),
    "stop_strings": _refused(_PREFIX + "; give eos_token_id"),
    "tokenizer": _refused("it is not used; leave it out"),
    "streamer": _refused("a canvas is filled in any order; read the tokens when the call returns"),
    "output_history": _refused(
        "only the last canvas is returned; call policy.sample with on_step="
    ),
    "output_scores": _SCORES,
    "output_logits": _SCORES,
    "generation_tokens_hook_func": _refused(
        "tokens are the policy's; call policy.sample with on_step="
    ),
    "generation_logits_hook_func": _refused("scores are the policy's; give attach a layout="),
}
"""Of `generate`, next to the arguments in its signature, which are read."""

_NATIVE = ("num_beams", "num_return_sequences", "repetition_penalty", "guidance_scale")


def pipeline_table(read: str, refused: Sequence[str]) -> Table:
    """The table of a diffusers pipeline: arguments that are read, and refused of `DENOISER`."""
    return dict.fromkeys(read.split(), READ) | {name: DENOISER[name] for name in refused}


def read_schedule(table: Table, asked: Mapping[str, Any], policy: Any) -> Any:
    """The policy of a call of a diffusers pipeline, with the call's `num_inference_steps`."""
    refuse_arguments(asked, table, policy)
    steps = asked.get("num_inference_steps")
    return policy if steps is None else set_steps(policy, steps)


def check_config(config: Any, policy: Any) -> None:
    """Refuse a call's `GenerationConfig` with options that a canvas cannot follow."""
    is_config = hasattr(config, "__dict__") and not isinstance(config, Mapping | Tensor)
    if config is not None and not is_config:
        raise OptionError(
            f"generation_config: expected a GenerationConfig, received a {type(config).__name__}; "
            "give GenerationConfig(...), or its options to the call"
        )
    refuse_arguments({name: getattr(config, name, None) for name in _NATIVE}, DENOISER, policy)


def find_left_out(config: Any) -> list[str]:
    """Notes on options of a model's own `GenerationConfig` that a canvas cannot follow."""
    return [
        f"{name} {getattr(config, name)} of the model's generation_config was left out"
        for name in _NATIVE
        if DENOISER[name].asks(getattr(config, name, None))
    ]
