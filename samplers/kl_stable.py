"""KLASS: slots that are sure and whose law has come to rest.

S. H. Kim et al., "KLASS: KL-Guided Fast Inference in Masked Diffusion Models", NeurIPS 2025, arXiv
2511.05664.

Departures: see `mmaccel.samplers.select_stable`; where no slot qualifies, one is committed.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmaccel.samplers.canvas_run import CanvasRun
from mmaccel.samplers.select import Memory, Selector
from mmaccel.samplers.select_confidence import Threshold
from mmaccel.samplers.select_sets import And, AtLeast
from mmaccel.samplers.select_stable import Stable
from mmaccel.samplers.selector_policy import SelectorPolicy


@dataclass(frozen=True)
class KLStable(SelectorPolicy):
    """Reference decoder: `Stepwise("confidence")`, which it is with threshold 1 or kl 0.

    Args:
        threshold: least probability of a slot's likeliest token.
        kl: nats a slot's law may have moved from one pass to the next.
        steps: passes it has to rest.
        block, cache: as in `Stepwise`.
    """

    threshold: float = 0.9
    kl: float = 0.01
    steps: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        Threshold(self.threshold)
        Stable(self.kl, self.steps)

    def selector(self, run: CanvasRun, memory: Memory) -> Selector:
        """See `SelectorPolicy`."""
        return AtLeast(1, And(Threshold(self.threshold), Stable(self.kl, self.steps)))
