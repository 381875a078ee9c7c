"""What the policies have in common that commit what a selector takes.

The loop is that of S. Nie et al., "Large Language Diffusion Models", 2025, arXiv 2502.09992,
algorithm 5, with the choice of slots left to a selector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mmaccel.results import Exactness, Generation
from mmaccel.samplers.cache_plan import CachePlan
from mmaccel.samplers.canvas_policy import RunPolicy
from mmaccel.samplers.canvas_run import CanvasRun
from mmaccel.samplers.select import Memory, Selector


@dataclass(frozen=True, kw_only=True)
class SelectorPolicy(RunPolicy):
    """Fields of all of them.

    Args:
        block: slots per block; None takes the canvas as one, or a block-causal model's own.
        cache: what passes reuse, a `CachePlan` or its kind.
    """

    block: int | None = None
    cache: CachePlan | str = "none"

    exactness: ClassVar[Exactness] = "relaxed"

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
