"""Autoregressive sampling: one token a pass, by the Gumbel-max rule (Gumbel 1954)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mmaccel.capabilities import NOTHING
from mmaccel.results import Exactness, Generation
from mmaccel.samplers.window.policy import WindowPolicy
from mmaccel.samplers.window.run import WindowRun
from mmaccel.samplers.window.seeded_sampling import choose_draws


@dataclass(frozen=True)
class Autoregressive(WindowPolicy):
    """Token by token; each is the argmax of scores plus noise that depends on (seed, item, slot).

    Cost: as many passes as tokens.
    Loses: as a rule; it wins where a pass costs by its tokens: large batches on a small processor.
    """

    exactness: ClassVar[Exactness] = "bitwise"
    is_capturable: ClassVar[bool] = True
    needs = NOTHING

    def decode(self, run: WindowRun) -> Generation:
        open_draws = choose_draws(run)

        def step_fn() -> None:
            tokens = open_draws(run).tokens()  # [B, 1]
            run.accept(tokens, tokens.new_empty(len(tokens), 0, dtype=torch.bool))  # no drafts

        return run.run(step_fn)
