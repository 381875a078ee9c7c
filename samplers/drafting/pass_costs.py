"""What passes of a window run cost, in plain passes: counted, or measured while it decodes.

A plain pass is one of width 1 in which no source learns anything. The clock is read once a pass.
A machine is slower now than a minute ago, so that a cost is a ratio of two medians of late passes.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, Protocol

_RECENT = 15  # passes of an arm whose median counts
_LEAST = 2  # timed passes after which a cost is known; the first one allocates, untimed


class Arm(NamedTuple):
    """What a pass may be.

    Attributes:
        source: number of the source that drafts.
        width: tokens of the pass, 1 for a plain one.
    """

    source: int
    width: int


PLAIN = Arm(0, 1)


class Costs(Protocol):
    """What passes cost."""

    def begin(self, arm: Arm) -> None:
        """A pass begins, and the one before it has ended."""

    def pause(self) -> None:
        """The pass that began is not timed: the run ends."""

    def expect(self, arm: Arm) -> tuple[float, float]:
        """The cost of a pass, in plain passes: what is hoped for, and what is to be feared."""


@dataclass
class CountedCosts:
    """1 for the first token of a pass, a share of it for each further one.

    Args:
        token_cost: the share.
    """

    token_cost: float

    def begin(self, arm: Arm) -> None:
        """See `Costs.begin`."""

    def pause(self) -> None:
        """See `Costs.pause`."""

    def expect(self, arm: Arm) -> tuple[float, float]:
        """See `Costs.expect`."""
        cost = 1 + self.token_cost * (arm.width - 1)
        return cost, cost


@dataclass
class MeasuredCosts:
    """Seconds of passes, over those of a plain one.

    A width that was not timed yet is hoped to cost as much as the nearest narrower one of its
    source, where there is none a plain one, and feared to cost as much for each of its tokens.
    Before plain passes were timed all others are feared without bound.

    Args:
        clock: seconds.

    Attributes:
        seconds: of late passes, by arm.
    """

    clock: Callable[[], float] = field(default_factory=lambda: time.perf_counter)
    seconds: dict[Arm, deque[float]] = field(default_factory=dict)
    _arm: Arm | None = field(default=None, init=False)  # of the pass that goes on
    _began: float = field(default=0.0, init=False)

    def begin(self, arm: Arm) -> None:
        """See `Costs.begin`."""
        now = self.clock()
        if self._arm is not None:
            known = self.seconds.get(self._arm)
            if known is None:
                self.seconds[self._arm] = deque(maxlen=_RECENT)
            else:
                known.append(now - self._began)
        self._arm = arm
        self._began = now

    def pause(self) -> None:
        """See `Costs.pause`."""
        self._arm = None

    def expect(self, arm: Arm) -> tuple[float, float]:
        """See `Costs.expect`."""
        if arm == PLAIN:
            return 1.0, 1.0
        plain = self._find_seconds(PLAIN)
        if plain is None:
            return math.inf, math.inf
        for width in range(arm.width, 1, -1):
            found = self._find_seconds(Arm(arm.source, width))
            if found is not None:
                cost = found / max(plain, 1e-9)
                return cost, cost * arm.width / width
        return 1.0, float(arm.width)

    def _find_seconds(self, arm: Arm) -> float | None:
        """Of a pass; None before enough were timed."""
        known = self.seconds.get(arm, ())
        return median(known) if len(known) >= _LEAST else None
