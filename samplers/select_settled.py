"""Settled: everything that is open, once what the model expects there stays and is sure.

Source: the stopping criterion "stable and confident" of DiffusionGemma in transformers 5.23.

Departures: there the likeliest tokens of the whole canvas end it; here a row's open slots of the
active block are committed as they are drawn, and the ledger charges them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.samplers.evidence import Evidence
from mmaccel.samplers.select import LogitsOnly, Memory
from mmaccel.samplers.select_checks import check_number


@dataclass(frozen=True)
class Settled(LogitsOnly):
    """All open slots of a row's active block, where no likeliest token has changed since the pass
    before and the slots' entropies are below `entropy` nats on average; none otherwise.
    """

    entropy: float = 0.005

    def __post_init__(self) -> None:
        check_number("settled", self.entropy, 0, float("inf"), "0.005 is usual, None waits")

    def select(self, seen: Evidence, memory: Memory) -> Tensor:
        """See `Selector`."""
        likeliest = seen.law.argmax(-1)  # [B, Q]
        before = memory.kept.get(self, likeliest.new_full(likeliest.shape, -1))
        memory.kept[self] = likeliest
        stays = ((likeliest == before) | ~seen.is_open).all(1) & ~memory.moved
        spread = torch.where(seen.is_open, seen.entropy, 0.0).sum(1)
        sure = spread < self.entropy * seen.is_open.sum(1)
        return seen.is_open & (stays & sure)[:, None]

    def rank(self, seen: Evidence) -> Tensor:
        """See `Selector`."""
        return seen.peak
