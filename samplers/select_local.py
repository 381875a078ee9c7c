"""Local leaps: around a slot that is sure, others are trusted earlier.

F. Kong et al., "Accelerating Diffusion LLM Inference via Local Determinism Propagation"
(LocalLeap), 2025, arXiv 2510.07081: high-confidence slots are anchors; inside a radius around them
the threshold is lower. Anchors are open slots of this pass; distance is counted in slots.

Departures: none in the rule.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import max_pool1d

from mmaccel.samplers.evidence import Evidence
from mmaccel.samplers.select import LogitsOnly, Memory
from mmaccel.samplers.select_checks import check_integer, check_number


@dataclass(frozen=True)
class Local(LogitsOnly):
    """Anchors, slots of probability `anchor`, and slots of `relaxed` at most `radius` from one."""

    anchor: float = 0.9
    radius: int = 4
    relaxed: float = 0.75

    def __post_init__(self) -> None:
        check_number("anchor", self.anchor, 0, 1, "0.9 is usual")
        check_integer("radius", self.radius, 0, "0 takes the anchors alone")
        check_number("relaxed", self.relaxed, 0, 1, "0.75 is usual, `anchor` turns it off")

    def select(self, seen: Evidence, memory: Memory) -> Tensor:
        """See `Selector`."""
        anchors = seen.is_open & (seen.peak >= self.anchor)
        width = 2 * min(self.radius, anchors.shape[1]) + 1
        near = max_pool1d(anchors[:, None].float(), width, 1, width // 2)[:, 0] > 0
        return anchors | (near & seen.is_open & (seen.peak >= self.relaxed))

    def rank(self, seen: Evidence) -> Tensor:
        """See `Selector`."""
        return seen.peak
