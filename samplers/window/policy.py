"""WindowPolicy: what the window policies have in common."""

from __future__ import annotations

from typing import ClassVar

from mmaccel.checks import check_callable
from mmaccel.contracts import Prompt, TokenModel, check_window
from mmaccel.results import Exactness, Generation, OnStep
from mmaccel.samplers.drafting.coarse import check_drafts
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.run import WindowRun


class WindowPolicy:
    """Base of window policies; a child is a frozen dataclass that implements `decode`.

    The fields `window` and `drafts` are checked here where a child has them. "adaptive" is a window
    of bitwise policies only: under others the tokens depend on the width.

    Attributes:
        exactness: what the policy guarantees.
        is_capturable: whether its steps may be captured as CUDA graphs.
    """

    exactness: ClassVar[Exactness]
    is_capturable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if hasattr(self, "window"):
            check_window(self.window, adaptive=self.exactness == "bitwise")
        if hasattr(self, "drafts"):
            check_drafts(self.drafts, self.exactness)

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
        check_callable("on_step", on_step)
        run = WindowRun(self, model, prompt, length, params=params, noise=noise, on_step=on_step)
        return self.decode(run)

    def decode(self, run: WindowRun) -> Generation:
        """Decode all rows of a fresh run."""
        raise NotImplementedError
