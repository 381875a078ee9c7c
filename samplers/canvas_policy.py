"""What the policies have in common that fill a canvas by one run of theirs."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from mmaccel.canvas_contracts import CanvasPolicy, Denoiser, OnCanvasStep
from mmaccel.contracts import Prompt
from mmaccel.results import Generation
from mmaccel.samplers.cache_plan import CachePlan, as_plan
from mmaccel.samplers.canvas_checks import check_block
from mmaccel.samplers.canvas_run import CanvasRun
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.noise import Noise


class RunPolicy(CanvasPolicy):
    """A `CanvasPolicy` in two steps, `open` a run and `decode` it.

    A subclass is a frozen dataclass and has these fields among its own, in its own order:

    Attributes:
        block: slots per block; None takes the canvas as one, or a block-causal model's own.
        cache: what passes reuse, a `CachePlan` or its kind.
    """

    block: int | None
    cache: CachePlan | str

    kind: ClassVar[str] = "canvas"

    @property
    def run_type(self) -> type[CanvasRun]:
        """What runs it."""
        return CanvasRun

    def __post_init__(self) -> None:
        check_block(self.block)
        object.__setattr__(self, "cache", as_plan(self.cache))

    def sample(
        self,
        model: Denoiser,
        prompt: Prompt,
        length: int,
        *,
        filters: Filters,
        noise: Noise,
        on_step: OnCanvasStep | None = None,
    ) -> Generation:
        """Fill `length` slots a row; see `mmaccel.canvas_contracts.CanvasPolicy.sample`."""
        run = self.open(model, prompt, length, filters=filters, noise=noise, on_step=on_step)
        return self.decode(run)

    def open(self, model: Denoiser, prompt: Prompt, length: int, **options: Any) -> CanvasRun:
        """A run of this policy, before its first pass."""
        return self.run_type(
            self, model, prompt, length, block=self.block, cache=as_plan(self.cache), **options
        )

    @abstractmethod
    def decode(self, run: CanvasRun) -> Generation:
        """Fill the canvas of a run of this policy."""
