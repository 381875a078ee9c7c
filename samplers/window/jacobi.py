"""Jacobi decoding with frozen noise: the plain loop's own tokens, several a pass.

Fixed-point view: Y. Song, C. Meng, R. Liao, S. Ermon, "Accelerating Feedforward Computation via
Parallel Nonlinear Equation Solving", ICML 2021 (arXiv 2002.03629), algorithm 1; A. Wiggers, E.
Hoogeboom, "Predictive Sampling with Forecasting Autoregressive Models", ICML 2020 (arXiv
2002.09928), section 2, for sampling with the noise held fixed.

Given its noise, the token of a slot is a function of the tokens before it: y_i = argmax_v
(score_i(v) + g_i(v)). Guess a window, evaluate all slots in one pass, and every slot whose left
side was guessed right is final. The answer is the sequential one whatever the guesses were, so
window, batch and draft source change the speed and nothing else.

Departures: the noise is made again from its counter at every pass (nothing of size [W, V] is kept),
rows advance at their own pace, and temperature 0 is ordinary (greedy) Jacobi decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mmaccel.contracts import Prompt, TokenModel, check_window
from mmaccel.results import Exactness, Generation, OnStep
from mmaccel.samplers.acceptance import count_leading
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.proposers import check_source
from mmaccel.samplers.window.run import WindowRun
from mmaccel.samplers.window.seeded_sampling import open_draws


@dataclass(frozen=True)
class Jacobi:
    """Fixed-point decoding; same seed, same tokens as `Autoregressive`.

    Args:
        window: tokens fed per pass, or "adaptive" to choose by measured cost.
        drafts: first content of new slots, one of `mmaccel.samplers.window.proposers.SOURCES`.
    """

    window: int | str = 32
    drafts: str = "neighbour"

    exactness: ClassVar[Exactness] = "bitwise"
    is_capturable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_window(self.window, adaptive=True)
        check_source(self.drafts)

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
        run = WindowRun(
            self,
            model,
            prompt,
            length,
            params=params,
            noise=noise,
            on_step=on_step,
            window=self.window,
            drafts=self.drafts,
        )

        def step_fn() -> None:
            draws = open_draws(run, run.noise)
            guess, law = run.propose()
            if guess is None:
                assert law is not None
                guess = draws.guess(law)
            drafts = run.write_drafts(guess)  # [B, W-1]
            tokens = draws.tokens()  # [B, W]
            run.accept(tokens, 1 + count_leading(tokens[:, :-1] == drafts))

        while run.width:
            run.run_step(step_fn)
        return run.generation()
