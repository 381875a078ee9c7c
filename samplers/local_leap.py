"""LocalLeap: sure slots, and around them slots that are nearly sure.

F. Kong et al., "Accelerating Diffusion LLM Inference via Local Determinism Propagation"
(LocalLeap), 2025, arXiv 2510.07081.

Departures: none in the rule; where there is no anchor, the surest slot is committed, as there.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmaccel.samplers.canvas_run import CanvasRun
from mmaccel.samplers.select import Memory, Selector
from mmaccel.samplers.select_local import Local
from mmaccel.samplers.select_sets import AtLeast
from mmaccel.samplers.selector_policy import SelectorPolicy


@dataclass(frozen=True)
class LocalLeap(SelectorPolicy):
    """Reference decoder: `Stepwise("confidence")`, which it is with anchor 1.

    Args:
        anchor: probability that makes a slot an anchor.
        radius: slots to both sides of an anchor.
        relaxed: least probability inside the radius.
        block, cache: as in `Stepwise`.
    """

    anchor: float = 0.9
    radius: int = 4
    relaxed: float = 0.75

    def __post_init__(self) -> None:
        super().__post_init__()
        Local(self.anchor, self.radius, self.relaxed)

    def selector(self, run: CanvasRun, memory: Memory) -> Selector:
        """See `SelectorPolicy`."""
        return AtLeast(1, Local(self.anchor, self.radius, self.relaxed))
