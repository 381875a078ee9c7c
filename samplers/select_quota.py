"""Quotas: so many slots at every pass, whatever the model says of them.

H. Chang et al., "MaskGIT", CVPR 2022, arXiv 2202.04200 (cosine); V. Besnier et al., "Halton
Scheduler for Masked Generative Image Transformer", ICLR 2025, arXiv 2503.17076 (arccos).

After pass t of T the share f(t / T) of the slots is left open: cosine cos(pi x / 2), arccos
arccos(x) / (pi / 2), linear 1 - x. Cosine and arccos take more at every pass: cosine begins with
few, arccos begins evenly and takes its largest share at the last one.

Departures: counted over the active block of every row; at least one slot is committed a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor

from mmaccel.samplers.evidence import Evidence
from mmaccel.samplers.select import Memory, Selector, top
from mmaccel.samplers.select_checks import check_choice, check_integer

SCHEDULES = ("cosine", "arccos", "linear")


@dataclass(frozen=True)
class Quota:
    """As many slots as a schedule has for the pass, from the top of a selector's rank.

    Args:
        schedule: one of `SCHEDULES`.
        steps: passes a block takes; the last one commits what is left.
        by: whose rank.
    """

    schedule: str
    steps: int
    by: Selector

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, SCHEDULES)
        check_integer("steps", self.steps, 1, "8 to 32 is usual")

    @property
    def sees_samples(self) -> bool:
        """Whether the rank does."""
        return self.by.sees_samples

    def select(self, seen: Evidence, memory: Memory) -> Tensor:
        """See `Selector`."""
        share = ((memory.passes + 1).double() / self.steps).clamp(max=1)  # [B]
        left = {
            "cosine": (share * pi / 2).cos(),
            "arccos": share.arccos() / (pi / 2),
            "linear": 1 - share,
        }[self.schedule]
        n_left = (memory.n_block * left + 1e-9).floor().long()  # up to rounding
        n_left = torch.where(share < 1, n_left, 0)
        n = (seen.is_open.sum(1) - n_left).clamp(min=1)
        return top(self.rank(seen), seen.is_open, n)

    def rank(self, seen: Evidence) -> Tensor:
        """See `Selector`."""
        return self.by.rank(seen)
