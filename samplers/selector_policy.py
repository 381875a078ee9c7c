"""What the policies have in common that commit what a selector takes.

The loop is that of S. Nie et al., "Large Language Diffusion Models", 2025, arXiv 2502.09992,
algorithm 5, with the choice of slots left to a selector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mmaccel.canvas_contracts import Denoiser, OnCanvasStep
from mmaccel.contracts import Prompt
from mmaccel.results import Exactness, Generation
from mmaccel.samplers.cache_plan import CachePlan, as_plan
from mmaccel.samplers.canvas_checks import check_block
from mmaccel.samplers.canvas_run import CanvasRun
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.select import Memory, Selector


@dataclass(frozen=True, kw_only=True)
class SelectorPolicy:
    """Fields of all of them.

    Args:
        block: slots per block; None takes the canvas as one, or a block-causal model's own.
        cache: what passes reuse, a `CachePlan` or its kind.
    """

    block: int | None = None
    cache: CachePlan | str = "none"

    exactness: ClassVar[Exactness] = "relaxed"
    kind: ClassVar[str] = "canvas"

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
        return CanvasRun(
            self, model, prompt, length, block=self.block, cache=as_plan(self.cache), **options
        )

    def decode(self, run: CanvasRun) -> Generation:
        """Fill the canvas of a run of this policy."""
        memory = Memory.of(run)
        selector = self.selector(run, memory)
        with run.interruptible():
            while run.is_open:
                seen = run.look()
                run.commit(seen, memory.choose(selector, seen))
        return run.generation()

    def selector(self, run: CanvasRun, memory: Memory) -> Selector:
        """What chooses the slots."""
        raise NotImplementedError
