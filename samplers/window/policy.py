"""WindowPolicy: what the window policies have in common."""

from __future__ import annotations

from typing import ClassVar

from mmaccel.contracts import Prompt, TokenModel
from mmaccel.results import Exactness, Generation, OnStep
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.run import WindowRun


class WindowPolicy:
    """Base of window policies; a child is a frozen dataclass that implements `decode`.

    Attributes:
        exactness: what the policy guarantees.
        is_capturable: whether its steps may be captured as CUDA graphs.
    """

    exactness: ClassVar[Exactness]
    is_capturable: ClassVar[bool] = False

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
        """Generate up to `length` tokens a row; see `mmaccel.contracts.Policy.sample`."""
        run = WindowRun(self, model, prompt, length, params=params, noise=noise, on_step=on_step)
        return self.decode(run)

    def decode(self, run: WindowRun) -> Generation:
        """Decode all rows of a fresh run."""
        raise NotImplementedError
