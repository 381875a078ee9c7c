"""What passes of a window run cost, in plain passes: counted, or measured while it decodes.

A plain pass is one of width 1 in which no source learns anything. A machine may be slower now than
a minute ago, so that a cost is a ratio of two medians of late passes, and forgotten where either
is old.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

_RECENT = 15  # passes of an arm whose median counts
_LEAST = 2  # timed passes after which a cost is known
_STALE = 128  # passes of others after which it is known no more


class Arm(NamedTuple):
    """What a pass may be.

    Attributes:
        source: number of the source that drafts.
        width: tokens of the pass, 1 for a plain one.
    """

    source: int
    width: int


PLAIN = Arm(0, 1)


@dataclass
class CountedCosts:
    """1 for the first token of a pass, a share of it for each further one.

    Args:
        token_cost: the share.
    """

    token_cost: float

    def add(self, arm: Arm, seconds: float) -> float:
        """What a pass has cost that took so long."""
        return self.expect(arm)[0]

    def find(self, arm: Arm) -> float:
        """The cost of a pass."""
        return self.expect(arm)[0]

    def expect(self, arm: Arm) -> tuple[float, float]:
        """The cost of a pass: what is hoped for, and what is to be feared."""
        cost = 1 + self.token_cost * (arm.width - 1)
        return cost, cost


@dataclass
class MeasuredCosts:
    """Seconds of passes, over those of a plain one.

    A width that was not timed yet is hoped to cost as much as the nearest narrower one of its
    source, where there is none a plain one, and feared to cost as much for each of its tokens.
    Before plain passes were timed, and again where that is long ago, all others are feared without
    bound. A pass is charged with what is feared after it: what happens once, as a compilation, is
    no cost of its arm.

    Attributes:
        seconds: of late passes, by arm; of each arm the first one, which allocates, is left out.
    """

    seconds: dict[Arm, deque[float]] = field(default_factory=dict)
    _n_passes: int = 0
    _timed: dict[Arm, int] = field(default_factory=dict)  # number of the last pass of an arm

    def add(self, arm: Arm, seconds: float) -> float:
        known = self.seconds.get(arm)
        if known is None:
            self.seconds[arm] = deque(maxlen=_RECENT)
        else:
            if self._is_stale(arm):
                known.clear()
            known.append(seconds)
        self._n_passes += 1
        self._timed[arm] = self._n_passes
        return self.expect(arm)[1]

    def _is_stale(self, arm: Arm) -> bool:
        return self._n_passes - self._timed.get(arm, 0) > _STALE

    def expect(self, arm: Arm) -> tuple[float, float]:
        if arm == PLAIN:
            return 1.0, 1.0
        if self._find_seconds(PLAIN) is None:
            return math.inf, math.inf
        for width in range(arm.width, 1, -1):
            cost = self.find(Arm(arm.source, width))
            if cost is not None:
                return cost, cost * arm.width / width
        return 1.0, float(arm.width)

    def find(self, arm: Arm) -> float | None:
        """The cost of a pass; None before enough of it and of plain ones were timed."""
        plain, own = self._find_seconds(PLAIN), self._find_seconds(arm)
        return None if plain is None or own is None else own / max(plain, 1e-9)

    def _find_seconds(self, arm: Arm) -> float | None:
        """Of a pass; None before enough were timed."""
        known = () if self._is_stale(arm) else self.seconds.get(arm, ())
        return median(known) if len(known) >= _LEAST else None
