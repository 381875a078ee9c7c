"""Confidence-aware parallel decoding: all slots a pass whose likeliest token is likely enough.

C. Wu et al., "Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and
Parallel Decoding", 2025, arXiv 2505.22618, section 3.3.

Departures: the rule "factor" is replaced by the Frechet profile, which contains it.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmaccel.samplers.canvas_run import CanvasRun
from mmaccel.samplers.select import Memory, Selector
from mmaccel.samplers.select_checks import check_choice
from mmaccel.samplers.select_confidence import Threshold
from mmaccel.samplers.select_frechet import FrechetProfile
from mmaccel.samplers.select_sets import AtLeast
from mmaccel.samplers.selector_policy import SelectorPolicy


@dataclass(frozen=True)
class ConfidentParallel(SelectorPolicy):
    """Reference decoder: `Stepwise("confidence")`, which it is with threshold 1 or factor 0.

    Args:
        threshold: least probability of a slot's likeliest token, for rule "threshold".
        rule: what takes slots, "threshold" or "frechet".
        factor: of the bound, 1 is the theorem's, for rule "frechet"; see `FrechetProfile`.
        block, cache: as in `Stepwise`.
    """

    threshold: float = 0.9
    rule: str = "threshold"
    factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("rule", self.rule, ("threshold", "frechet"))
        Threshold(self.threshold)
        FrechetProfile(self.factor)

    def selector(self, run: CanvasRun, memory: Memory) -> Selector:
        """See `SelectorPolicy`."""
        if self.rule == "frechet":
            return FrechetProfile(self.factor)
        return AtLeast(1, Threshold(self.threshold))
