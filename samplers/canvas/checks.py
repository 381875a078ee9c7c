"""Checks of a canvas run before its first pass."""

from __future__ import annotations

from typing import Any

import torch

from mmaccel.capabilities import explain, refuse
from mmaccel.checks import check_int, show
from mmaccel.contracts import Denoiser, Prompt
from mmaccel.errors import OptionError
from mmaccel.samplers.canvas.cache_plan import as_plan
from mmaccel.samplers.checks import check_noise
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams


def check_run(
    policy: Any,
    model: Denoiser,
    prompt: Prompt,
    length: int,
    params: SamplingParams,
    noise: Noise,
) -> None:
    check_model(model)
    refuse(explain(policy, model))
    check_int("length", length, 1, hint="ask for at least 1 slot")
    check_noise(noise.seeds, prompt.batch)
    if prompt.batching is not None and not model.any_rows:
        raise OptionError(
            f"batching: expected None for a {type(model).__name__}, which keeps something for each "
            f"row of the prompt, received {show(prompt.batching)}; decode batch by batch"
        )
    if params.processor is not None:
        raise OptionError(
            "params: expected no processor, received one; a canvas has no prefix for it, use a "
            "layout for what may stand at a slot"
        )
    if params.is_spread:
        raise OptionError(
            f"spread: expected None on a canvas, whose slots are filled in any order, received "
            f"{params.spread}; leave it out"
        )
    params.check_branches(prompt.branches)
    most = model.max_positions
    longest = int(prompt.lengths.max()) + length
    if most is not None and longest > most:
        raise OptionError(
            f"length: expected at most {most} positions, which the model was made for, received "
            f"{longest} for the longest prompt and its canvas; ask for fewer tokens or shorten the "
            "prompt"
        )
    index = torch.arange(prompt.tokens.shape[1], device=prompt.tokens.device)
    is_mask = (prompt.tokens == model.mask_token) & (index < prompt.lengths[:, None])
    if model.mask_token is not None and bool(is_mask.any()):
        raise OptionError(
            f"prompt: expected no mask token, received id {model.mask_token} in row "
            f"{int(is_mask.any(1).nonzero()[0])}; leave open slots to the canvas, and give known "
            "ones by a layout"
        )
    block = policy.block
    _check_blocks(model, prompt, length, block)
    if as_plan(policy.cache).kind == "block" and block not in (None, model.block):
        raise OptionError(
            f"block: expected the model's own {model.block} with a block-causal cache, received "
            f"{block}; leave it out"
        )


def check_model(model: Any) -> None:
    if not isinstance(model, Denoiser):
        raise OptionError(
            f"policy: expected one that decodes token after token for a {type(model).__name__}, "
            "received one that fills a canvas; choose one such as Jacobi()"
        )


def _check_blocks(model: Denoiser, prompt: Prompt, length: int, block: int | None) -> None:
    if model.lengths is not None and length != sum(model.lengths):
        raise OptionError(
            f"length: expected {sum(model.lengths)} slots, as many as the model's scales have, "
            f"received {length}; ask for those"
        )
    if model.block is None:
        if block is not None and length % block and block < length:
            raise OptionError(
                f"block: expected one that divides {length} slots, received {block}; "
                f"ask for {-(-length // block) * block} slots, or choose another block"
            )
        return
    if block is not None and (model.block % block):
        raise OptionError(
            f"block: expected one that divides the model's blocks of {model.block}, received "
            f"{block}; leave it out for the model's own"
        )
    ends = prompt.lengths.view(prompt.branches, -1) % model.block
    if bool((ends != ends[:1]).any()):
        raise OptionError(
            f"guidance: expected prompts of all branches that end alike in the model's blocks of "
            f"{model.block}, received others; pad the shorter ones on the left"
        )
