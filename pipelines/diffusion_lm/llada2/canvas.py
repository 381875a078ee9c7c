"""A call of `LLaDA2Pipeline`, decoded by a canvas policy over the model's own block mask.

The blocks and positions of a row count from its own first token. The pipeline counts from the first
column of the batch, padding included; for rows without padding the two are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mmaccel.contracts import Layout, Prompt
from mmaccel.pipelines.diffusion_lm.cached import CachedDenoiser
from mmaccel.pipelines.diffusion_lm.llada2.block_cache import BlockCall
from mmaccel.pipelines.diffusion_lm.pipeline_service import check_inputs, make_output
from mmaccel.pipelines.generate_call import align_left
from mmaccel.pipelines.step_callback import call_back
from mmaccel.policies import CanvasProgress
from mmaccel.results import Stats
from mmaccel.samplers.noise import Noise, draw_seed
from mmaccel.samplers.sampling_params import SamplingParams

REFERENCE = "one commit a pass over the model's own 4-D block mask"
_PROMPT = (
    "prompt", "messages", "input_ids", "attention_mask", "use_chat_template",
    "add_generation_prompt",
)  # fmt: skip


@torch.no_grad()
def decode(
    pipe: Any,
    policy: Any,
    call: BlockCall,
    model: CachedDenoiser,
    seed: int | Sequence[int] | None,
    layout: Layout | None,
) -> tuple[Any, Stats]:
    """Decode a call by a canvas policy.

    Args:
        pipe: the pipeline, for its tokenizer and its checks.
        policy: a canvas policy.
        call: the pipeline's call.
        model: the pipeline's.
        seed: of the noise; None draws one from the call's `generator`.
        layout: of the slots.

    Returns:
        The pipeline's output, and the statistics.

    Raises:
        ValueError: from the pipeline's own checks.
        CanvasInterrupt, OptionError, ShapeError, NumericsError: of a canvas run.
    """
    from diffusers.pipelines.llada2.pipeline_llada2 import LLaDA2PipelineOutput

    given = call.arguments
    checked = {**given, "block_length": call.block}
    checked["callback_on_step_end_tensor_inputs"] = call.callback_tensors
    check_inputs(pipe, checked)
    asked = {name: given[name] for name in _PROMPT}
    ids, visible = pipe._prepare_input_ids(**asked, chat_template_kwargs=None)
    ids = ids.to(model.device)
    visible = visible.to(model.device).bool()
    ends = given.get("eos_early_stop") and call.end_token >= 0
    stops = ids.new_tensor([call.end_token]) if ends else None
    prompt = Prompt(align_left(ids, visible), visible.sum(1), stop_tokens=stops, layout=layout)
    params = read_params(given)
    if seed is None and params.temperature > 0:
        seed = draw_seed(given["generator"])
    noise = Noise.from_seed(0 if seed is None else seed, prompt.batch, ids.device)
    callback = given["callback_on_step_end"]

    def on_step(progress: CanvasProgress) -> None:
        """The pipeline's step callback, called after every pass."""
        canvas = torch.where(progress.is_committed, progress.tokens, call.mask_token)
        tokens = {"block_x": torch.cat([ids, canvas], 1)}
        step = progress.passes - 1
        call_back(callback, pipe, step, step, tokens, remedy="use CachedBlocks() or layout=")

    generation = policy.sample(
        model, prompt, call.length,
        params=params, noise=noise, on_step=None if callback is None else on_step,
    )  # fmt: skip
    slots = torch.arange(call.length, device=ids.device)
    sequences = torch.where(slots < generation.lengths[:, None], generation.tokens, call.mask_token)
    generation.stats.reference, generation.stats.seed = REFERENCE, seed
    out = make_output(LLaDA2PipelineOutput, pipe.tokenizer, sequences, call.end_token, given)
    return out, generation.stats


def read_params(given: Any) -> SamplingParams:
    """The pipeline's sampling arguments as `SamplingParams`."""
    temperature, method = given["temperature"], given["sampling_method"]
    top_k, top_p = given["top_k"], given["top_p"]
    return SamplingParams(
        temperature=0.0 if method == "greedy" else temperature,
        top_k=None if top_k is None or top_k <= 0 else top_k,
        top_p=None if top_p is None or top_p >= 1 else top_p,
    )
