"""The entropy bound: as many of the most certain slots as cost no more than gamma nats.

H. Ben-Hamu et al., "Accelerated Sampling from Masked Diffusion Models via Entropy Bounded
Unmasking", NeurIPS 2025, arXiv 2505.24857, section 4 (the rule) and 5 (the bound): slots drawn from
their marginals instead of their joint law diverge from it by at most the sum of their entropies
less the largest.

Departures: none in the rule; ties go to the lowest slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.samplers.evidence import Evidence
from mmaccel.samplers.select import LogitsOnly, Memory, ranked
from mmaccel.samplers.select_checks import check_number


@dataclass(frozen=True)
class EntropyBound(LogitsOnly):
    """The longest prefix, by entropy, that costs at most `gamma`; one slot costs nothing."""

    gamma: float = 0.1

    def __post_init__(self) -> None:
        check_number("gamma", self.gamma, 0, float("inf"), "0.1 is usual, 0 is exact")

    def select(self, seen: Evidence, memory: Memory) -> Tensor:
        """See `Selector`."""
        turns, costs = prefix_costs(seen)
        n = (costs <= self.gamma).sum(1, keepdim=True)  # costs never fall
        return seen.is_open & (turns < n)

    def rank(self, seen: Evidence) -> Tensor:
        """See `Selector`."""
        return -seen.entropy


def prefix_costs(seen: Evidence) -> tuple[Tensor, Tensor]:
    """Slots by entropy.

    Returns:
        Turns `[B, Q]` int64 of the slots, and `[B, Q]` float64: nats that the first k + 1 of them
        cost at most, the same for all that are no open slots any more.
    """
    turns = ranked(-seen.entropy, seen.is_open)
    spread = torch.where(seen.is_open, seen.entropy.double(), 0.0)
    spread = torch.empty_like(spread).scatter_(1, turns, spread)
    return turns, (spread.cumsum(1) - spread.cummax(1).values).clamp(min=0)
