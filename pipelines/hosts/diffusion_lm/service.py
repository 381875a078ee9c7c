"""The service of denoisers: `generate` with transformers' arguments, decoded by a canvas policy.

Also as `diffusion_generate` where the model has that (Dream). Arguments are those of transformers
5.23, and of the published loops of LLaDA, Dream and Fast-dLLM v2.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmaccel.pipelines.hosts.attach.service import Methods
from mmaccel.pipelines.hosts.attach.unwrap import unwrap
from mmaccel.pipelines.hosts.diffusion_lm.arguments import DENOISER, check_config, find_left_out
from mmaccel.pipelines.hosts.diffusion_lm.canvas_call import read_canvas
from mmaccel.pipelines.hosts.diffusion_lm.pipeline_service import PolicyService
from mmaccel.pipelines.hosts.diffusion_lm.registry import open_denoiser
from mmaccel.pipelines.hosts.diffusion_lm.self_check import find_fault
from mmaccel.pipelines.hosts.generate_call import Task, refuse_arguments
from mmaccel.pipelines.hosts.layers.methods import reducing
from mmaccel.results import Generation
from mmaccel.samplers.noise import Noise, draw_seed
from mmaccel.samplers.run_lock import alone


class DenoiserService(PolicyService):
    """Serves a denoiser or a model behind one; there is no call that `strict` would refuse."""

    def open(self) -> None:
        self._denoiser = open_denoiser(self.target)
        self.target = unwrap(self.target)
        inner = self._denoiser.model
        self._model = self._denoiser if inner is None else inner
        self.n_ids = self._denoiser.vocab_size

    def lack(self, word: str, part: Any = None) -> str:
        lack = self._denoiser.lack(word, part)
        if word == "finished blocks" and not lack and not self._denoiser.is_self_checked:
            return find_fault(self._denoiser) or ""
        return lack

    def methods(self) -> list[tuple[Any, Methods]]:
        names = ["generate"]
        if callable(getattr(type(self.target), "diffusion_generate", None)):
            names.append("diffusion_generate")
        return [(self.target, dict.fromkeys(names, self.generate))]

    @torch.no_grad()
    def generate(
        self,
        target: Any,
        inputs: Tensor | None = None,
        generation_config: Any = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        max_new_tokens: int | None = None,
        gen_length: int | None = None,
        max_length: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        guidance_scale: float | None = None,
        negative_prompt_ids: Tensor | None = None,
        negative_prompt_attention_mask: Tensor | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        return_dict_in_generate: bool | None = None,
        **others: Any,
    ) -> Any:
        """Fill a canvas after every prompt: `[B, T + longest]` int64, or transformers' object with
        it.

        Args:
            inputs, input_ids: two names of the prompts, `[B, T]` int64.
            attention_mask: `[B, T]`, 0 on padding, on any side.
            max_new_tokens, gen_length, max_length: slots; `max_length` counts the prompt's columns.
            do_sample, temperature: False or 0 takes the likeliest tokens.
            guidance_scale: s of u + s (c - u), with u of the negative prompt, `[B, N]` or `[1, N]`.
            eos_token_id: a row ends at the first of these that is committed.
            pad_token_id: fills a row after its end; by default an end token does.
            others: None, or arguments of other loops that change nothing.

        Raises:
            CanvasInterrupt: instead of KeyboardInterrupt, with what was committed.
        """
        for name in others.keys() - DENOISER.keys():
            raise TypeError(f"generate() got an unexpected keyword argument {name!r}")
        refuse_arguments(others, DENOISER, self.policy)
        check_config(generation_config, self.policy)
        if (inputs is None) == (input_ids is None):
            received = "neither" if inputs is None else "both"
            raise TypeError(f"generate() expected one of inputs and input_ids, received {received}")
        given = {
            "input_ids": input_ids if inputs is None else inputs,
            "attention_mask": attention_mask,
            "max_new_tokens": max_new_tokens,
            "gen_length": gen_length,
            "max_length": max_length,
            "do_sample": do_sample,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
            "return_dict_in_generate": return_dict_in_generate,
            "guidance_scale": guidance_scale,
            "negative_prompt_ids": negative_prompt_ids,
            "negative_prompt_attention_mask": negative_prompt_attention_mask,
        }
        task = read_canvas(given, generation_config, self._denoiser, self.layout)
        generation = self._decode(task)
        generation.stats.notes += find_left_out(getattr(self._model, "generation_config", None))
        self.record(generation.stats)
        return task.hand_over(generation)

    def _decode(self, task: Task) -> Generation:
        """A run of the policy; tokens in the model's own numbering."""
        began = time.perf_counter()
        denoiser = self._denoiser
        prompt = task.prompt
        seed = self.seed
        if seed is None and task.samples:
            seed = draw_seed(None)
        noise = Noise.from_seed(0 if seed is None else seed, prompt.batch, prompt.tokens.device)
        methods = self.layer_methods
        with alone(self._model), reducing(denoiser, methods, prompt.branches):
            generation = self.policy.sample(
                denoiser, prompt, task.length, params=task.params, noise=noise
            )
        methods.record(generation.stats, denoiser)
        generation.stats.seconds = time.perf_counter() - began
        generation.stats.seed = seed
        if hasattr(denoiser, "to_model"):
            generation = replace(generation, tokens=denoiser.to_model(generation.tokens))
        return generation
