"""Entropy-bounded unmasking: as many slots a pass as their entropies allow.

H. Ben-Hamu et al., "Accelerated Sampling from Masked Diffusion Models via Entropy Bounded
Unmasking", NeurIPS 2025, arXiv 2505.24857, section 4.

Departures: a budget in nats for the whole sequence can take the place of the bound per step.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmaccel.errors import OptionError
from mmaccel.results import Generation
from mmaccel.samplers.canvas_run import CanvasRun
from mmaccel.samplers.select import Memory, Selector
from mmaccel.samplers.select_budget import BudgetBound
from mmaccel.samplers.select_entropy import EntropyBound
from mmaccel.samplers.selector_policy import SelectorPolicy


@dataclass(frozen=True)
class EntropyBounded(SelectorPolicy):
    """Reference decoder: `Stepwise("entropy")`; each pass diverges from it by `gamma` nats at most,
    or the whole row by `budget_nats`, relative to the model's own conditionals.

    Args:
        gamma: nats a pass; 0.1 where neither is given.
        budget_nats: nats a row in all, spent at an even pace. One below what two slots cost commits
            one slot a pass, which costs 0 nats; `stats.notes` says so where nothing was spent.
        block, cache: as in `Stepwise`.
    """

    gamma: float | None = None
    budget_nats: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma is not None and self.budget_nats is not None:
            raise OptionError(
                f"gamma, budget_nats: expected one of both, received {self.gamma!r} and "
                f"{self.budget_nats!r}; a bound per pass or a budget per row"
            )
        if self.gamma is None and self.budget_nats is None:
            object.__setattr__(self, "gamma", 0.1)
        _ = self._rule

    @property
    def _rule(self) -> EntropyBound | BudgetBound:
        if self.gamma is not None:
            return EntropyBound(self.gamma)
        assert self.budget_nats is not None
        return BudgetBound(self.budget_nats)

    def selector(self, run: CanvasRun, memory: Memory) -> Selector:
        """See `SelectorPolicy`."""
        return self._rule

    def decode(self, run: CanvasRun) -> Generation:
        """Fill the canvas of a run of this policy."""
        made = super().decode(run)
        if self.budget_nats is not None and made.stats.accepted == [made.stats.row_passes]:
            made.stats.notes.append(
                f"budget_nats: {self.budget_nats:g} bought no second slot at any pass; one slot a "
                "pass was committed, and nothing spent"
            )
        return made
