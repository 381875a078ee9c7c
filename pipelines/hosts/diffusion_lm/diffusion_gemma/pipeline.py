"""diffusers' `DiffusionGemmaPipeline`, whose canvases the served `generate` of its model fills.

Source: `diffusers.pipelines.diffusion_gemma`, diffusers 0.42.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor

from mmaccel.pipelines.hosts.attach.service import Methods
from mmaccel.pipelines.hosts.diffusion_lm.arguments import pipeline_table
from mmaccel.pipelines.hosts.diffusion_lm.diffusion_gemma.canvas import ignores_criterion
from mmaccel.pipelines.hosts.diffusion_lm.diffusion_gemma.generate import GemmaRun, GemmaService
from mmaccel.pipelines.hosts.diffusion_lm.pipeline_service import (
    callback_tensors,
    check_inputs,
    make_output,
)
from mmaccel.pipelines.hosts.generate_call import bind_call, refuse_arguments
from mmaccel.pipelines.hosts.original_methods import original
from mmaccel.pipelines.hosts.step_callback import call_back
from mmaccel.samplers.noise import draw_seed
from mmaccel.samplers.sampling_params import SamplingParams

ARGUMENTS = pipeline_table(
    "prompt messages image add_generation_prompt gen_length num_inference_steps temperature "
    "cache_implementation eos_early_stop eos_token_id generator output_type return_dict "
    "callback_on_step_end callback_on_step_end_tensor_inputs",
    refused=("stability_threshold", "confidence_threshold"),
)


class GemmaPipelineService(GemmaService):
    """Serves the calls of one pipeline, and those of its model."""

    def find_model(self) -> Any:
        return self.target.model

    def methods(self) -> list[tuple[Any, Methods]]:
        return [*super().methods(), (self.target, {"__call__": self._call})]

    @torch.no_grad()
    def _call(self, pipe: Any, *args: Any, **options: Any) -> Any:
        from diffusers.pipelines.diffusion_gemma import DiffusionGemmaPipelineOutput

        own = original(pipe, "__call__")
        bound = bind_call(own, args, options)
        if bound is None:
            return own(*args, **options)
        asked, given = bound
        if ignores_criterion(self.policy):
            refuse_arguments(asked, ARGUMENTS, self.policy)
        callback = given["callback_on_step_end"]
        names = callback_tensors(given, ("canvas",))
        check_inputs(pipe, {**given, "callback_on_step_end_tensor_inputs": names})
        names_of_inputs = ("prompt", "messages", "image", "add_generation_prompt")
        inputs = {name: given[name] for name in names_of_inputs}
        ids, visible, images = pipe._prepare_inputs(**inputs)
        device = pipe._execution_device
        ids = ids.to(device)
        end = given["eos_token_id"]
        end = pipe.eos_token_id if end is None else end
        schedule, params = _temperatures(pipe.scheduler, given)

        def change_config(config: Any) -> None:
            stops = given["eos_early_stop"] and end is not None
            config.eos_token_id = config.pad_token_id = end if stops else None
            config.t_min, config.t_max = schedule
            config.stability_threshold = max(given["stability_threshold"], 1)
            config.confidence_threshold = given["confidence_threshold"]

        total = count()

        def after_pass(step: int, canvas: Tensor, scores: Tensor) -> None:
            """The pipeline's step callback, called after every pass of every canvas."""
            tensors = {"canvas": canvas, "logits": scores}
            shown = {name: tensors[name] for name in names}
            call_back(callback, pipe, next(total), step, shown, remedy="use layout=")

        seed = draw_seed(given["generator"]) if self.seed is None else self.seed
        watch = None if callback is None else after_pass
        run = GemmaRun(self._model, self.policy, seed, self.layout, params, change_config, watch)
        inputs = {name: value.to(device) for name, value in images.items()}
        inputs |= {
            "attention_mask": visible.to(device),
            "max_new_tokens": given["gen_length"],
            "max_denoising_steps": given["num_inference_steps"],
            "cache_implementation": given["cache_implementation"],
            "disable_compile": True,  # as in the pipeline, which leaves that to its user
            "return_dict_in_generate": True,
        }
        out = self.run(run, (ids,), inputs)
        tokens = out.sequences[:, ids.shape[1] :]
        return make_output(DiffusionGemmaPipelineOutput, pipe.processor, tokens, end, given)


def _temperatures(
    scheduler: Any, given: Mapping[str, Any]
) -> tuple[tuple[float | None, float | None], SamplingParams]:
    """The scheduler's temperatures where it has a schedule, else the call's temperature."""
    low, high = (getattr(scheduler.config, name, None) for name in ("t_min", "t_max"))
    if low is not None and high is not None:
        return (low, high), SamplingParams()
    return (None, None), SamplingParams(temperature=given["temperature"])
