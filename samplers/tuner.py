"""Tuner: which of a few choices gains most for what it costs, learned while they are used.

A choice is a number, such as tokens a pass; the first is plain: a use gains 1. What others cost is
counted in plain uses, by late seconds of both.

A choice is taken where all uses so far, were this one to gain as little as a plain one, would have
lost no more than a share of what they gained ("Conservative Bandits", Y. Wu et al., ICML 2016,
arXiv 1602.04282). Of those the one that may gain most for its cost is taken. An unused one is hoped
to continue the line of the two before it; beyond one that cannot win, wider ones are not tried.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

_RECENT = 15  # uses whose median is what one takes now
_LEAST = 2  # timed uses after which a cost is known
_DRIFT = 1.35  # factor by which the seconds of a choice may change before all are timed again
_ENOUGH = 64  # uses after which a gain is taken for certain
STALE = 128  # passes, for costs of texts' drafts
_MOST_KEPT = 64  # tuners of a model; the oldest is dropped first


class Tuner:
    """What was measured of some choices, plain first. Threads may share one."""

    def __init__(
        self,
        choices: Sequence[int],  # for `choose` in ascending order
        cost: float | None = None,  # of each further token or canvas, in plain uses; None: measured
        *,
        margin: float = 1.0,  # how much better than plain another has to be: clocks are noisy
        spread: float = 0.0,  # standard deviation of a gain, as a share of it
        risk: float = 0.0,  # share of the gains that may be lost
        loan: float = math.inf,  # plain uses that may be lost beside them
        n_untimed: int = 1,  # first uses of a choice, which allocate or compile and are not timed
        stale: int | None = None,  # uses of others after which a cost is forgotten; None: never
    ) -> None:
        self.choices = tuple(choices)
        self._plain = self.choices[0]
        self.total = 0.0  # seconds of all uses
        # of a use now, by choice, of those that were timed: of late ones the lower third
        self.seconds: dict[int, float] = {}
        self._share = cost
        self._margin, self._spread = margin, spread
        self._risk, self._room = risk, loan
        self._n_untimed, self._stale = n_untimed, stale
        self._seconds: dict[Hashable, tuple[float, ...]] = {}  # of choices, also by stage
        self._first: dict[Hashable, float] = {}  # seconds when they were first known, by stage
        self._gains: dict[int, tuple[float, float]] = {}  # sums of gains and of uses
        self._n_used = dict.fromkeys(self.choices, 0)
        self._last = dict.fromkeys(self.choices, 0)  # number of the last use
        self._n_uses = 0

    def time(self, choice: int, use: Callable[[], Any]) -> Any:
        """What a use answers, which is timed."""
        began = time.perf_counter()
        answer = use()
        self.add(choice, time.perf_counter() - began)
        return answer

    def add(self, choice: int, seconds: float, gain: float = 1.0, stage: int = 0) -> None:
        """Count a use; seconds of a choice are held against each other within a `stage`."""
        if self._is_stale(choice):
            self._seconds[choice] = ()
        self._n_uses += 1
        self._n_used[choice] += 1
        self._last[choice] = self._n_uses
        self.total += seconds
        if self._n_used[choice] > self._n_untimed:
            recent = sorted(self._note(choice, seconds))
            self.seconds[choice] = recent[(len(recent) - 1) // 3]
            self._check_drift((choice, stage), self._note((choice, stage), seconds))
        self._room += self._risk * gain
        if choice != self._plain:
            cost = self.cost(choice)
            if cost is None:  # more than is feared happens once, as a compilation does
                plain = self.seconds.get(self._plain, seconds)
                cost = min(seconds / max(plain, 1e-9), self.expect(choice)[1])
            self._room += gain - cost

    def learn(self, choice: int, gain: float, n_uses: float = 1.0) -> None:
        """Note what uses of a choice gained in all."""
        gained, n_before = self._gains.get(choice, (0.0, 0.0))
        self._gains[choice] = gained + gain, n_before + n_uses

    def forget_gains(self) -> None:
        """Learn anew what uses gain; what they cost stays."""
        self._gains = {}

    def cost(self, choice: int) -> float | None:
        """Plain uses that a use takes as long as; None where it is not known."""
        if self._share is not None:
            return 1 + self._share * (choice - 1)
        for each in (self._plain, choice):
            if self._is_stale(each) or len(self._seconds.get(each, ())) < _LEAST:
                return None
        plain = self.seconds.get(self._plain)
        seconds = self.seconds.get(choice)
        return None if plain is None or seconds is None else seconds / max(plain, 1e-9)

    def gain(self, choice: int) -> float:
        """Mean gain of a use, at least 1."""
        gained, n_uses = self._gains.get(choice, (0.0, 0.0))
        return max(gained / n_uses, 1.0) if n_uses else 1.0

    def expect(self, choice: int) -> tuple[float, float]:
        """What a use costs: what is hoped for, and what is feared."""
        cost = self.cost(choice)
        if cost is not None:
            return cost, cost
        last = max((c for c in self.choices if c < choice and self.cost(c)), default=self._plain)
        known = self.cost(last) or 1.0
        hoped = known if last == self._plain else _extend(choice, last, known)
        return hoped, known * choice / last

    def hope(self, choice: int) -> float:
        """What a use may gain: its mean and three standard errors, at most the choice itself."""
        gained, n_uses = self._gains.get(choice, (0.0, 0.0))
        if choice == self._plain:
            return 1.0
        if n_uses:
            doubt = self._spread / n_uses**0.5 if n_uses < _ENOUGH else 0.0
            return min(self.gain(choice) * (1 + 3 * doubt), choice)
        learned = [c for c in self.choices[1:] if c < choice and c in self._gains]
        last = learned[-1] if learned else None
        return choice if last is None else min(_extend(choice, last, self.hope(last)), choice)

    def choose(
        self,
        most: int,  # the greatest that may be tried of those whose cost is not known
        hope: Callable[[int], float] | None = None,  # what a use may gain; None: `Tuner.hope`
        *,
        lag: float = 0.0,  # of the slowest user behind the mean at a gain of 1; sqrt(n) times at n
        kept: int | None = None,  # a choice that is kept as long as it may be better than plain
    ) -> int:
        """The choice for the next use."""
        hope = hope or self.hope
        chosen = self._plain
        best = self._margin
        if self.cost(chosen) is None:
            return chosen
        for choice in self.choices[1:]:
            cost = self.cost(choice)
            if cost is None and choice > most:
                continue
            hoped, feared = self.expect(choice) if cost is None else (cost, cost)
            if feared - 1 <= self._room + 1e-9:
                gain = hope(choice)
                worth = gain / (1 + lag * gain**0.5) / max(hoped, 1e-9)
                if worth > self._margin and choice == kept:
                    return choice
                if worth > best:
                    best, chosen = worth, choice
            if cost is None and self._n_used[choice] < self._n_untimed + _LEAST:
                break  # greater ones wait for it
        return chosen

    def _is_stale(self, choice: int) -> bool:
        return self._stale is not None and self._n_uses - self._last[choice] > self._stale

    def _note(self, key: Hashable, seconds: float) -> tuple[float, ...]:
        recent = self._seconds[key] = (*self._seconds.get(key, ()), seconds)[-_RECENT:]
        return recent

    def _check_drift(self, key: Hashable, recent: tuple[float, ...]) -> None:
        """Time all choices again where one takes another time for long."""
        if len(recent) < _RECENT:
            return
        now = median(recent)
        before = self._first.setdefault(key, now)
        if not 1 / _DRIFT < now / max(before, 1e-9) < _DRIFT:
            self._seconds, self._first, self.seconds = {}, {}, {}


def _extend(choice: int, last: int, value: float) -> float:
    """What is 1 for a choice of 1 and has this value for the last one, in a straight line."""
    return 1 + (value - 1) * (choice - 1) / (last - 1)


_kept: WeakKeyDictionary[Any, dict[Hashable, Any]] = WeakKeyDictionary()


def keep(model: Any, conditions: Hashable, make: Callable[[], Any]) -> Any:
    """What was learned about a model under some conditions, kept as long as it lives. Wrappers of
    one `model` share it; what cannot be weakly referenced gets a new one.
    """
    try:
        known = _kept.setdefault(model if model.model is None else model.model, {})
    except TypeError:
        return make()
    if conditions not in known:
        if len(known) >= _MOST_KEPT:
            del known[next(iter(known))]
        known.setdefault(conditions, make())
    return known[conditions]
