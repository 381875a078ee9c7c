"""KLASS: slots that are sure and whose law has come to rest.

S. H. Kim et al., "KLASS: KL-Guided Fast Inference in Masked Diffusion Models", NeurIPS 2025, arXiv
2511.05664.

Departures: see `mmaccel.samplers.canvas.kl_stable`; where no slot qualifies, one is committed.

Stability: slots whose law has not moved for some passes.

S. H. Kim et al., "KLASS: KL-Guided Fast Inference in Masked Diffusion Models", NeurIPS 2025, arXiv
2511.05664.

Departures: a slot counts as stable only once it has been seen that often in its block (the release
also counts what it saw of the slot while the block before was decoded, and takes none for stable in
a block's first `steps` - 1 passes); kept per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.checks import check_int, check_number
from mmaccel.samplers.canvas.confident_parallel import Threshold
from mmaccel.samplers.canvas.policy import SelectorPolicy
from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.canvas.run import CanvasRun
from mmaccel.samplers.canvas.selector import And, AtLeast, LogitsOnly, Selector, SelectorState


@dataclass(frozen=True)
class Stable(LogitsOnly):
    """Slots whose law diverged from the pass before by less than `kl` nats, `steps` passes long.

    Costs the laws of the active block, `[B, Q, V]` float32, between two passes.
    """

    kl: float = 0.01
    steps: int = 2

    def __post_init__(self) -> None:
        check_number("kl", self.kl, 0, float("inf"), "0.01 is usual")
        check_int("steps", self.steps, 1, hint="2 is usual")

    def select(self, seen: SlotPredictions, memory: SelectorState) -> Tensor:
        """See `Selector`."""
        law = seen.law.log_softmax(-1)  # [B, Q, V]
        before, calm = memory.kept.get(self, (law, torch.zeros_like(seen.slots)))
        moved = memory.moved[:, None]
        terms = torch.where(law > float("-inf"), law.exp() * (law - before), 0.0)
        calm = torch.where((terms.sum(-1) < self.kl) & ~moved, calm + 1, 0)  # NaN is not calm
        memory.kept[self] = (law, calm)
        return seen.is_open & (calm >= self.steps)

    def rank(self, seen: SlotPredictions) -> Tensor:
        """See `Selector`."""
        return seen.peak


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

    def selector(self, run: CanvasRun, memory: SelectorState) -> Selector:
        """See `SelectorPolicy`."""
        return AtLeast(1, And(Threshold(self.threshold), Stable(self.kl, self.steps)))
