"""A budget in nats for the whole sequence, spent at an even pace.

The cost of a step is that of H. Ben-Hamu et al., 2025, arXiv 2505.24857; costs of steps add up
(see `mmaccel.samplers.ledger`), so that a bound on their sum bounds the divergence of the whole
sequence's law from stepwise decoding in the same order.

Departures: the paper bounds every step alone. Here, after k more commits of L, at most the share
(committed + k) / L of the budget may be spent; what a step leaves over is there for later ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.samplers.evidence import Evidence
from mmaccel.samplers.select import LogitsOnly, Memory
from mmaccel.samplers.select_checks import check_number
from mmaccel.samplers.select_entropy import prefix_costs


@dataclass(frozen=True)
class BudgetBound(LogitsOnly):
    """The largest prefix, by entropy, that keeps the pace; one slot costs nothing and always does.

    So a budget below what two slots cost commits one slot a pass and spends nothing.
    """

    nats: float = 1.0

    def __post_init__(self) -> None:
        check_number("budget_nats", self.nats, 0, float("inf"), "0 is exact")

    def select(self, seen: Evidence, memory: Memory) -> Tensor:
        """See `Selector`."""
        turns, costs = prefix_costs(seen)
        more = torch.arange(1, turns.shape[1] + 1, device=turns.device)
        more = torch.minimum(more, seen.is_open.sum(1, keepdim=True))
        share = (memory.n_done[:, None] + more) / memory.n_slots[:, None].clamp(min=1).double()
        fits = memory.spent[:, None] + costs <= self.nats * share
        n = (fits * more).amax(1, keepdim=True).clamp(min=1)
        return seen.is_open & (turns < n)

    def rank(self, seen: Evidence) -> Tensor:
        """See `Selector`."""
        return -seen.entropy
