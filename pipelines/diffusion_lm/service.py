"""The service of denoisers: `generate` with transformers' arguments, decoded by a canvas policy.

Models whose code comes with their checkpoint have no `generate`, or one of their own, or call it
`diffusion_generate` (Dream); what they get here is one method for all of them, under both names
where the model has both.

Sources of the arguments: `generate` of transformers 5.23, and of the published loops those of
LLaDA, Dream and Fast-dLLM v2 (see `mmaccel.pipelines.diffusion_lm.models`).

A run without a pass: what a policy refuses of every call of a denoiser, it refuses at once.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmaccel.canvas_contracts import Denoiser
from mmaccel.contracts import Layout, Prompt
from mmaccel.pipelines.attach.generate_call import hand_over
from mmaccel.pipelines.attach.layout_processor import check_size
from mmaccel.pipelines.attach.patching import Injection, as_function
from mmaccel.pipelines.attach.unwrap import unwrap
from mmaccel.pipelines.diffusion_lm.call import DenoiserCall, Rows, negative_rows
from mmaccel.pipelines.diffusion_lm.registry import open_denoiser
from mmaccel.pipelines.diffusion_lm.unsupported_arguments import (
    check_config,
    check_others,
    find_left_out,
)
from mmaccel.pipelines.runner.run_lock import alone
from mmaccel.results import Generation, Stats
from mmaccel.samplers.canvas.policy import RunPolicy
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams


def open_empty(policy: Any, denoiser: Denoiser) -> None:
    """Open a run of a policy and leave it at that.

    Args:
        policy: one that opens no runs passes.
        denoiser: what it is to decode.

    Raises:
        OptionError: a policy that cannot fill its canvases.
        UnsupportedModelError: a model that does not go by what the policy needs.

    Cost: none but the self-check of a model that nobody checked, where its blocks are to be kept.
    """
    if not isinstance(policy, RunPolicy):
        return
    first = 1 if denoiser.mask_token == 0 else 0
    line = torch.full((1, 1), first, dtype=torch.int64, device=denoiser.device)
    noise = Noise.from_seed(0, 1, denoiser.device)
    prompt = Prompt(line, torch.ones_like(line[0]), stop_tokens=line[0])  # calls may have others
    policy.open(denoiser, prompt, policy.block or 1, params=SamplingParams(), noise=noise)


class DenoiserService:
    """Serves the calls of one denoiser.

    Args:
        denoiser: what the policy decodes.
        policy, seed, layout: see `mmaccel.attach`.

    Attributes:
        history: statistics of all calls, the last one at the end.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        policy: Any,
        seed: int | Sequence[int] | None = None,
        layout: Layout | None = None,
    ) -> None:
        self.policy, self.seed, self.layout = policy, seed, layout
        self.history: list[Stats] = []
        self._denoiser = denoiser
        self._model = getattr(denoiser, "model", denoiser)

    def inject(self, target: Any) -> Injection:
        """Give an object the methods.

        Raises:
            AttachError: it has a policy already.
        """
        own = callable(getattr(type(target), "diffusion_generate", None))
        names = ("generate", "diffusion_generate") if own else ("generate",)
        injection = Injection()
        injection.add(target, {name: _as_method(self.generate, name) for name in names}, new=True)
        return injection

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
        """Fill a canvas behind every prompt.

        Args:
            target: the object that has this method.
            inputs, input_ids: two names of the prompts, `[B, T]` int64.
            generation_config: what the call itself does not say.
            attention_mask: `[B, T]`, 0 on padding, on any side.
            max_new_tokens, gen_length, max_length: slots, the last with the prompt's columns.
            do_sample, temperature: False or 0 takes likeliest tokens.
            top_k, top_p, min_p: of the law that is drawn from.
            guidance_scale: s of u + s (c - u), with u of the negative prompt.
            negative_prompt_ids, negative_prompt_attention_mask: `[B, N]` or `[1, N]`, as above.
            eos_token_id: a row ends at the first of these that is committed.
            pad_token_id: what stands behind; an end token where there is none.
            return_dict_in_generate: whether transformers' output object is wanted.
            others: None, or arguments of other loops that change nothing.

        Returns:
            `[B, T + longest]` int64, the prompts as they were given, or the object with it.

        Raises:
            CanvasInterrupt: in the place of KeyboardInterrupt, with what was committed.
            OptionError, ShapeError, UnsupportedModelError: before the first pass.
            TypeError: an argument that nobody knows, or no prompts.
            BusyError: another call of the same model is under way.
        """
        check_others(others, self.policy)
        check_config(generation_config, self.policy)
        if (inputs is None) == (input_ids is None):
            said = "neither" if inputs is None else "both"
            raise TypeError(f"generate() expected one of inputs and input_ids, received {said}")
        given = {
            "max_new_tokens": max_new_tokens, "gen_length": gen_length, "max_length": max_length,
            "do_sample": do_sample, "temperature": temperature, "top_k": top_k, "top_p": top_p,
            "min_p": min_p, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id,
            "return_dict_in_generate": return_dict_in_generate, "guidance_scale": guidance_scale,
        }  # fmt: skip
        ids: Any = input_ids if inputs is None else inputs
        away = negative_rows(negative_prompt_ids, negative_prompt_attention_mask)
        call = DenoiserCall(Rows(ids, attention_mask), away, given, generation_config, self._model)
        made = self._decode(call)
        made.stats.notes += find_left_out(getattr(self._model, "generation_config", None))
        self.history.append(made.stats)
        return hand_over(ids, made, call.filler, call.as_output)

    def _decode(self, call: DenoiserCall) -> Generation:
        """Tokens `[B, L]` as the model has them."""
        began = time.perf_counter()
        denoiser, params, length = self._denoiser, call.params, call.length
        prompt = call.prompt(denoiser, self.layout)
        seed = self.seed
        if seed is None:
            seed = int(torch.randint(2**63 - 1, ())) if params.temperature else 0
        noise = Noise.from_seed(seed, prompt.batch, prompt.tokens.device)
        with alone(self._model):
            made = self.policy.sample(denoiser, prompt, length, params=params, noise=noise)
        tokens = made.tokens
        if hasattr(denoiser, "to_model"):
            tokens = denoiser.to_model(tokens)
        made.stats.seconds = time.perf_counter() - began
        return Generation(tokens, made.lengths, made.passes, made.stats)


def _as_method(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function that a class can hold, with the signature of a method of another object."""
    held = functools.wraps(method)(as_function(method))
    held.__name__ = held.__qualname__ = name
    return held


def serve(
    target: Any,
    policy: Any,
    seed: int | Sequence[int] | None,
    strict: bool,
    layout: Layout | None,
) -> tuple[DenoiserService, Injection]:
    """Attach a checked policy to a denoiser, or to a model that is served through one; there is no
    call that `strict` would refuse.

    Raises:
        OptionError: no possible mask token, a model in training mode, a policy that cannot fill its
            canvases, or a layout of another vocabulary.
        UnsupportedModelError: a model that does not go by what its family goes by, or one that
            keeps nothing under a policy with a cache.
        AttachError: the target has a policy already.
    """
    denoiser = open_denoiser(target)
    open_empty(policy, denoiser)
    check_size(layout, denoiser.vocab_size)
    service = DenoiserService(denoiser, policy, seed, layout)
    return service, service.inject(unwrap(target))
