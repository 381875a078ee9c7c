"""Threshold: slots whose likeliest token is likely enough.

C. Wu et al., "Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and
Parallel Decoding", 2025, arXiv 2505.22618, section 3.3.

Departures: the probability is the model's before temperature and truncation, and of the likeliest
token, not of the drawn one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmaccel.samplers.evidence import Evidence
from mmaccel.samplers.select import LogitsOnly, Memory
from mmaccel.samplers.select_checks import check_number


@dataclass(frozen=True)
class Threshold(LogitsOnly):
    """Slots of `least` probability or more; it may be none."""

    least: float = 0.9

    def __post_init__(self) -> None:
        check_number("threshold", self.least, 0, 1, "0.9 is usual")

    def select(self, seen: Evidence, memory: Memory) -> Tensor:
        """See `Selector`."""
        return seen.is_open & (seen.peak >= self.least)

    def rank(self, seen: Evidence) -> Tensor:
        """See `Selector`."""
        return seen.peak
