"""diffusers' `AmusedPipeline` under a canvas policy, which runs in place of its scheduler's loop.

Sources: `AmusedPipeline`, `AmusedScheduler` and `UVit2DModel`, diffusers 0.42. S. Patil et al.,
"aMUSEd: An Open MUSE Reproduction", 2024, arXiv 2401.01808.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.checks import check_answer
from mmaccel.contracts import CanvasPass, Denoiser, Prompt
from mmaccel.pipelines.hosts.attach.service import Methods
from mmaccel.pipelines.hosts.diffusion_lm.arguments import pipeline_table, read_schedule
from mmaccel.pipelines.hosts.diffusion_lm.known_tokens import KnownTokens
from mmaccel.pipelines.hosts.diffusion_lm.pipeline_service import PolicyService
from mmaccel.pipelines.hosts.diffusion_lm.selected_logits import gather_rows
from mmaccel.pipelines.hosts.generate_call import bind_call
from mmaccel.pipelines.hosts.original_methods import original
from mmaccel.pipelines.hosts.step_callback import check_unchanged
from mmaccel.policies import CanvasProgress
from mmaccel.samplers.noise import Noise, draw_seed
from mmaccel.samplers.sampling_params import SamplingParams

ARGUMENTS = pipeline_table(
    "prompt height width num_inference_steps guidance_scale negative_prompt num_images_per_prompt "
    "generator latents prompt_embeds encoder_hidden_states negative_prompt_embeds "
    "negative_encoder_hidden_states output_type return_dict callback callback_steps "
    "cross_attention_kwargs micro_conditioning_aesthetic_score micro_conditioning_crop_coord",
    refused=("temperature",),
)
REFERENCE = "one commit a pass over the pipeline's transformer; not the pipeline's scheduler"


@dataclass
class GridCall:
    """A call of the pipeline."""

    policy: Any  # with the call's number of steps
    given: Mapping[str, Any]  # its arguments, with defaults
    has_begun: bool = False  # a callback that calls the model later gets the model
    tokens: Tensor | None = None  # [B, h, w] int64, what the policy made


class AmusedService(PolicyService):
    """Serves the calls of one pipeline; there is no call that `strict` would refuse."""

    def open(self) -> None:
        self._model = self.target.transformer
        self._scheduler = self.target.scheduler
        self.n_ids = self._model.config.codebook_size

    def methods(self) -> list[tuple[Any, Methods]]:
        return [
            (self._model, {"__call__": self._model_call}),
            (self._scheduler, {"step": self._step}),
            (self.target, {"__call__": self._pipe_call}),
        ]

    def _pipe_call(self, pipe: Any, *args: Any, **options: Any) -> Any:
        own = original(pipe, "__call__")
        bound = bind_call(own, args, options)
        if bound is None:
            return own(*args, **options)
        asked, given = bound
        policy = read_schedule(ARGUMENTS, asked, self.policy)
        with self.running(GridCall(policy, given)):
            return own(**given | {"num_inference_steps": 1, "callback": None})

    def _model_call(self, model: Any, tokens: Tensor, *args: Any, **conditions: Any) -> Any:
        passes = original(model, "__call__")
        call = self.call
        if call is None or call.has_begun:
            return passes(tokens, *args, **conditions)
        call.has_begun = True
        branches = 2 if call.given["guidance_scale"] > 1.0 else 1
        call.tokens = self._decode(call, tokens.chunk(branches)[0], passes, conditions, branches)
        # the pipeline chunks it for guidance
        return torch.zeros(branches, 1, device=tokens.device, dtype=torch.float32)

    def _step(self, scheduler: Any, *args: Any, **options: Any) -> Any:
        if self.call is None or self.call.tokens is None:
            return original(scheduler, "step")(*args, **options)
        from diffusers.schedulers.scheduling_amused import AmusedSchedulerOutput

        return AmusedSchedulerOutput(self.call.tokens)

    def _decode(
        self,
        call: GridCall,
        latents: Tensor,
        passes: Callable[..., Any],
        conditions: Mapping[str, Any],
        branches: int,
    ) -> Tensor:
        """Tokens `[B, h, w]` for latents that may already hold some of them."""
        given = call.given
        mask_token = self._scheduler.config.mask_token_id
        size = self._model.config.codebook_size
        scale = self.target.vae_scale_factor
        default_size = self._model.config.sample_size * scale
        height = (given["height"] or default_size) // scale
        width = (given["width"] or default_size) // scale
        batch = len(conditions["micro_conds"]) // branches
        hint = "give ids of the codebook and mask tokens, or leave latents out"
        within = (0, max(mask_token, size - 1))
        check_answer("latents", latents, (batch, height, width), "int", hint, within=within)
        latents = latents.long()
        model = GridDenoiser(passes, conditions, (height, width), mask_token, size, branches)
        seed = draw_seed(given["generator"]) if self.seed is None else self.seed
        column = latents.new_full((branches * batch, 1), 0 if mask_token else 1)
        known = torch.where(latents == mask_token, -1, latents).flatten(1)
        layout = KnownTokens(known, self.layout, columns=width, frame=height * width)
        prompt = Prompt(column, torch.ones_like(column[:, 0]), branches=branches, layout=layout)
        callback, every = given["callback"], given["callback_steps"]

        def on_step(progress: CanvasProgress) -> None:
            step, is_committed = progress.passes - 1, progress.is_committed
            if step % every:
                return
            canvas = torch.where(is_committed, progress.tokens, mask_token)
            canvas = canvas.unflatten(1, (height, width))
            shown = canvas.clone()
            callback(step, (~is_committed).sum(1).max(), shown)
            check_unchanged("latents", shown, canvas, "use layout= or latents=")

        generation = call.policy.sample(
            model,
            prompt,
            height * width,
            params=SamplingParams(guidance_scale=given["guidance_scale"] if branches > 1 else 1.0),
            noise=Noise.from_seed(seed, batch, latents.device),
            on_step=None if callback is None else on_step,
        )
        generation.stats.reference, generation.stats.seed = REFERENCE, seed
        self.record(generation.stats)
        tokens: Tensor = generation.tokens.view(batch, height, width)
        return tokens


class GridDenoiser(Denoiser):
    """A `Denoiser` of a grid's tokens; a row's prompt is one column, which is never seen."""

    def __init__(
        self,
        call: Callable[..., Tensor],  # the model, [R, h, w] int64 to logits [R, V, h, w]
        # its other arguments; tensors [G * B, ...], unconditional rows first
        conditions: Mapping[str, Any],
        grid: tuple[int, int],  # (h, w)
        mask_token: int,
        vocab_size: int,
        branches: int,
    ) -> None:
        self._call, self._grid, self._branches = call, grid, branches
        self.model = getattr(call, "__self__", call)  # outlives this object, as measurements do
        self.mask_token, self.vocab_size = mask_token, vocab_size
        self._conditions = {name: self._swap(value) for name, value in conditions.items()}
        tensors = [value for value in conditions.values() if isinstance(value, Tensor)]
        self._device = tensors[0].device

    @property
    def device(self) -> torch.device:
        return self._device

    def reserve(self, rows: int, cache_size: int) -> None:
        """There is no cache."""

    def forward(self, entries: CanvasPass) -> Tensor:
        rows = entries.tokens.shape[0]
        tokens = entries.tokens[:, 1:].unflatten(1, self._grid)  # [R, h, w]
        conditions = {name: self._repeat(value, rows) for name, value in self._conditions.items()}
        logits = self._call(tokens, **conditions).flatten(2).transpose(1, 2)  # [R, h * w, V]
        return gather_rows(logits, entries.queries - 1)

    def _swap(self, value: Any) -> Any:
        """Conditional rows first, the order of a canvas run."""
        if not isinstance(value, Tensor) or self._branches == 1:
            return value
        return torch.cat(value.chunk(self._branches)[::-1])

    def _repeat(self, value: Any, rows: int) -> Any:
        """`[G * B, ...]` for `[G * K * B]` rows, K drafts of each canvas."""
        if not isinstance(value, Tensor) or value.shape[0] == rows:
            return value
        split = value.unflatten(0, (self._branches, 1, -1))
        copies = rows // value.shape[0]
        return split.expand(-1, copies, *split.shape[2:]).flatten(0, 2)
