"""Grouped speculative decoding: accept a draft by the mass of its group of like tokens. Relaxed.

"Grouped Speculative Decoding for Autoregressive Image Generation", ICCV 2025 (arXiv 2508.07747),
sections 4.1 to 4.3. Image tokens are exchangeable within groups of similar ones; comparing P(G)
with Q(G) of the group around the draft accepts more than comparing p(x) with q(x).

Cost in exactness: accepting with probability a(x) >= min(1, p/q) everywhere and redrawing from
(p - q)+ moves the token's distribution by exactly A - A0 in total variation, with A = sum q a and
A0 = 1 - TV(p, q), the acceptance of the exact rule. `Stats.total_variation` reports the sum.

Departures: the ratio of sums is below min(1, p/q) for some tokens, which wastes acceptance at no
gain; here a(x) is the larger of both. Groups are ranks around the draft, without the distance of
code vectors, and shrink at the ends of the ranking instead of falling back. Drafts after the first
rejection are redrawn with an exact coupling (maximal unless asked otherwise), and a new slot's
distribution is recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmaccel.checks import check_int, check_number
from mmaccel.results import Exactness, Generation
from mmaccel.samplers.acceptance import Coupling, at_tokens, check_coupling, exact_acceptance
from mmaccel.samplers.drafting.coarse import Coarse
from mmaccel.samplers.window.policy import WindowPolicy
from mmaccel.samplers.window.run import WindowRun
from mmaccel.samplers.window.speculative_jacobi import iterate


@dataclass(frozen=True)
class GroupedSpeculative(WindowPolicy):
    """GSD with acceptance never below the exact rule's; reports what it spent.

    Args:
        window: tokens processed per pass.
        group: ranks on either side that belong to a token's group; 0 is the exact rule.
        max_gap: members whose probability differs by this or more are left out, in [1e-6, 1].
        coupling: redraw of drafts after the first rejection, as in `SpeculativeJacobi`.
        drafts: where drafts come from, as in `SpeculativeJacobi`.
    """

    window: int = 32
    group: int = 7
    max_gap: float = 0.15
    coupling: Coupling = "maximal"
    drafts: str | Coarse = "neighbour"

    exactness: ClassVar[Exactness] = "relaxed"
    is_capturable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_coupling(self.coupling)
        check_int("group", self.group, 0, 2**31 - 1, hint="0 is exact")
        check_number("max_gap", self.max_gap, 1e-6, 1, "1 turns the limit off")

    def decode(self, run: WindowRun) -> Generation:
        """See `WindowPolicy.decode`."""
        return iterate(run, self.coupling, self.rule)

    def rule(
        self, p_target: Tensor, p_draft: Tensor, drafts: Tensor, coins: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Accept with the probability of the draft's group.

        Args:
            p_target: `[B, K, V]`.
            p_draft: `[B, K, V]`.
            drafts: `[B, K]` int64.
            coins: `[B, K]` in (0, 1).

        Returns:
            Accepted `[B, K]` bool, and the total variation `[B, K]` that this spends on each slot.
        """
        exact = exact_acceptance(p_target, p_draft)
        acceptance = exact
        if self.group:
            ratio = group_ratio(p_target, p_draft, self.group, self.max_gap)
            acceptance = torch.maximum(exact, ratio)
        spent = (p_draft * (acceptance - exact)).sum(-1)
        return coins < at_tokens(acceptance, drafts), spent


def group_ratio(p_target: Tensor, p_draft: Tensor, group: int, max_gap: float) -> Tensor:
    """min(1, P(G)/Q(G)) for the group around every token.

    The group of the token of rank r (by p_target, falling) holds ranks r-group … r+group-1 whose
    probability is less than `max_gap` away from the token's; with group 0 it holds the token alone.

    Args:
        p_target: `[B, K, V]`.
        p_draft: `[B, K, V]`.
        group: ranks on either side.
        max_gap: largest difference in probability, exclusive, at least 1e-6.

    Returns:
        `[B, K, V]` in 0..1.
    """
    ordered, order = p_target.sort(dim=-1, descending=True, stable=True)
    size = ordered.shape[-1]
    rank = torch.arange(size, device=ordered.device).expand_as(ordered)
    rising = -ordered.contiguous()
    # a gap that counts has a probability of at least `max_gap` above it: few ranks are so high
    high_up = rising[..., : min(size, int(1 / max_gap) + 1)].contiguous()
    low = torch.searchsorted(high_up, rising - max_gap, right=True)  # first rank close enough above
    high = torch.full_like(rank, size)  # first rank too far below
    high[..., : high_up.shape[-1]] = torch.searchsorted(rising, high_up + max_gap, right=False)
    low = torch.maximum(low, rank - group).minimum(rank)  # whatever rounding does to a tiny
    high = torch.minimum(high, rank + group).maximum(rank + 1)  # gap, a token is in its group
    mass = _between(ordered, low, high), _between(p_draft.gather(-1, order), low, high)
    ratio = torch.where(mass[1] > 0, (mass[0] / mass[1]).clamp(0.0, 1.0), 1.0).to(p_target.dtype)
    return torch.empty_like(ratio).scatter_(-1, order, ratio)


def _between(weights: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Sums of `weights[..., low:high]`, by differences of a float64 running sum."""
    running = torch.nn.functional.pad(weights.cumsum(-1, dtype=torch.float64), (1, 0))
    return running.gather(-1, high) - running.gather(-1, low)
