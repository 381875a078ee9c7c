"""Autoregressive sampling: one token a pass. The oracle that every other sampler is held against.

A token is drawn by the Gumbel-max rule (Gumbel 1954): argmax of score plus frozen noise, which is a
draw from the softmax. With the noise keyed by (seed, item, slot) the output is a function of model,
prompt and seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mmaccel.contracts import Prompt, TokenModel
from mmaccel.results import Exactness, Generation, OnStep
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.run import WindowRun
from mmaccel.samplers.window.seeded_sampling import open_draws


@dataclass(frozen=True)
class Autoregressive:
    """Token by token. Cost: as many passes as tokens."""

    exactness: ClassVar[Exactness] = "bitwise"
    is_capturable: ClassVar[bool] = True

    def sample(
        self,
        model: TokenModel,
        prompt: Prompt,
        length: int,
        *,
        params: SamplingParams,
        noise: Noise,
        on_step: OnStep | None = None,
    ) -> Generation:
        """Make up to `length` tokens a row; see `mmaccel.contracts.Policy.sample`."""
        run = WindowRun(self, model, prompt, length, params=params, noise=noise, on_step=on_step)

        def step_fn() -> None:
            run.accept(open_draws(run, run.noise).tokens(), torch.ones_like(run.made))

        while run.width:
            run.run_step(step_fn)
        return run.generation()
