"""A selector that follows an order of `mmaccel.samplers.orders`, one slot a pass."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmaccel.samplers.evidence import Evidence
from mmaccel.samplers.orders import Order
from mmaccel.samplers.select import Memory


@dataclass(frozen=True, eq=False)
class ByOrder:
    """The next slot of an order; others rank behind it in that order."""

    order: Order

    @property
    def sees_samples(self) -> bool:
        """Whether the order does."""
        return self.order.name == "sampled"

    def select(self, seen: Evidence, memory: Memory) -> Tensor:
        """See `Selector`."""
        return self.order.first(seen)

    def rank(self, seen: Evidence) -> Tensor:
        """See `Selector`."""
        return self.order.score(seen)
