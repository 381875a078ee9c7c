"""diffusers' `DiffusionGemmaPipeline` under a canvas policy: its signature and output stay.

The pipeline prepares the prompt; canvases are filled by the served `generate` of its model, which
makes the same loop over encoder and canvases.

Source: `diffusers.pipelines.diffusion_gemma`, diffusers 0.42.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import Layout
from mmaccel.errors import OptionError
from mmaccel.pipelines.attach.layout_processor import check_vocabulary
from mmaccel.pipelines.attach.patching import Injection, original
from mmaccel.pipelines.attach.pipeline_call import bind_call, draw_seed
from mmaccel.pipelines.diffusion_lm.diffusion_gemma.canvas import Then
from mmaccel.pipelines.diffusion_lm.diffusion_gemma.generate import (
    GemmaRun,
    GemmaService,
    as_function,
    check_gemma,
)
from mmaccel.samplers.sampling_params import SamplingParams


class GemmaPipelineService(GemmaService):
    """Serves the calls of one pipeline, and of its model.

    Args:
        pipe: the pipeline.
        policy, seed, strict, layout: see `mmaccel.attach`.
    """

    def __init__(
        self,
        pipe: Any,
        policy: Any,
        seed: int | Sequence[int] | None,
        strict: bool,
        layout: Layout | None,
    ) -> None:
        super().__init__(pipe.model, policy, seed, strict, layout)
        self._pipe = pipe

    def inject(self, injection: Injection) -> None:
        """See `GemmaService.inject`."""
        try:
            super().inject(injection)
            injection.add(self._pipe, {"__call__": as_function(self._call)})
        except Exception:
            injection.remove()
            raise

    @torch.no_grad()
    def _call(self, pipe: Any, *args: Any, **options: Any) -> Any:
        own = original(pipe, "__call__")
        given = bind_call(own, args, options)
        if given is None:
            return own(*args, **options)
        callback = given["callback_on_step_end"]
        names = given["callback_on_step_end_tensor_inputs"]
        names = getattr(callback, "tensor_inputs", names)
        names = ["canvas"] if names is None else names
        checked = {**given, "callback_on_step_end_tensor_inputs": names}
        asked = inspect.signature(pipe.check_inputs).parameters
        pipe.check_inputs(**{name: checked[name] for name in asked})
        wanted = ("prompt", "messages", "image", "add_generation_prompt")
        ids, visible, images = pipe._prepare_inputs(**{name: given[name] for name in wanted})
        device = pipe._execution_device
        ids = ids.to(device)
        end = given["eos_token_id"]
        end = pipe.eos_token_id if end is None else end
        schedule, params = _temperatures(pipe.scheduler, given)

        def change(config: Any) -> None:
            stops = given["eos_early_stop"] and end is not None
            config.eos_token_id = config.pad_token_id = end if stops else None
            config.t_min, config.t_max = schedule
            config.stability_threshold = max(given["stability_threshold"], 1)
            config.confidence_threshold = given["confidence_threshold"]

        then = None if callback is None else _tell(pipe, callback, names)
        seed = draw_seed(given["generator"]) if self.seed is None else self.seed
        run = GemmaRun(self._model, self.policy, seed, self.layout, params, change, then)
        inputs = {name: value.to(device) for name, value in images.items()}
        inputs |= {
            "attention_mask": visible.to(device),
            "max_new_tokens": given["gen_length"],
            "max_denoising_steps": given["num_inference_steps"],
            "cache_implementation": given["cache_implementation"],
            "disable_compile": True,  # as in the pipeline, which leaves that to its user
            "return_dict_in_generate": True,
        }
        out = self.serve(run, (ids,), inputs)
        return _hand_over(pipe, out.sequences[:, ids.shape[1] :], end, given)


def _temperatures(
    scheduler: Any, given: Mapping[str, Any]
) -> tuple[tuple[float | None, float | None], SamplingParams]:
    """The scheduler's temperatures where it has a schedule, else the call's."""
    low, high = (getattr(scheduler.config, name, None) for name in ("t_min", "t_max"))
    if low is not None and high is not None:
        return (low, high), SamplingParams()
    return (None, None), SamplingParams(temperature=given["temperature"])


def _tell(pipe: Any, callback: Any, names: Sequence[str]) -> Then:
    """The pipeline's step callback, told after every pass."""
    count = iter(range(2**62))

    def then(step: int, canvas: Tensor, scores: Tensor) -> None:
        tensors = {"canvas": canvas.clone(), "logits": scores}
        back = callback(pipe, next(count), step, {name: tensors[name] for name in names})
        changed = back.get("canvas") if isinstance(back, dict) else None
        if changed is not None and not torch.equal(changed, canvas):
            raise OptionError(
                "callback: expected the canvas as it was given, received another one; a canvas "
                "policy cannot take tokens from outside, use layout="
            )

    return then


def _hand_over(pipe: Any, sequences: Tensor, end: int | None, given: Mapping[str, Any]) -> Any:
    """Sequences `[B, L]` int64 as the pipeline returns them."""
    from diffusers.pipelines.diffusion_gemma import DiffusionGemmaPipelineOutput

    texts = None
    if given["output_type"] == "text":
        rows = []
        for row in sequences:
            ends = (row == end).nonzero() if end is not None else row.new_zeros(0, 1)
            rows.append(row[: int(ends[0]) + 1] if len(ends) else row)
        texts = pipe.processor.batch_decode(rows, skip_special_tokens=True)
    if not given["return_dict"]:
        return sequences, texts
    return DiffusionGemmaPipelineOutput(sequences=sequences, texts=texts)


def serve(
    pipe: Any,
    policy: Any,
    seed: int | Sequence[int] | None,
    strict: bool,
    layout: Layout | None,
) -> tuple[GemmaPipelineService, Injection]:
    """Attach a checked policy to a pipeline.

    Raises:
        OptionError: a policy that cannot fill its canvases, or a layout of another vocabulary.
        AttachError: the pipeline or its model has a policy already.
    """
    check_gemma(policy, type(pipe).__name__)
    check_vocabulary(layout, pipe.model)
    service = GemmaPipelineService(pipe, policy, seed, strict, layout)
    injection = Injection()
    service.inject(injection)
    return service, injection
