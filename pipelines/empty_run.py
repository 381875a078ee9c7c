"""A run without a pass: what a policy refuses of every call of a denoiser, it refuses at once."""

from __future__ import annotations

from typing import Any

import torch

from mmaccel.canvas_contracts import Denoiser
from mmaccel.contracts import Prompt
from mmaccel.samplers.canvas_policy import RunPolicy
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.noise import Noise


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
    policy.open(denoiser, prompt, policy.block or 1, filters=Filters(), noise=noise)
