"""Draft counts: how many canvases the next pass of nested drafts computes.

A pass over K canvases gains 1 to K slots. A measured number is the one with the most slots per
second, found out by a `Tuner` in passes that decode real slots; decoding takes longer than with one
canvas a pass by two passes and 2 % at most, up to the noise of the clock. Only for a policy whose
tokens do not depend on it. Drafts are nested, so that a pass of K canvases also tells what fewer
would have gained.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from mmaccel.samplers.tuner import Tuner, keep
from mmaccel.samplers.window.window_size import lag_of_slowest

CANDIDATES = (1, 2, 4, 8)


def make_tuner() -> Tuner:
    return Tuner(CANDIDATES, margin=1.04, risk=0.02, loan=2.0, n_untimed=0)


class MeasuredDrafts:
    """The number with the most slots per second.

    Passes are measured while they compute as many rows as the widest one so far; a pass of fewer
    rows takes what was best for these. Measurements are kept for the model, by `conditions` and the
    number of rows; `length` is in slots a row.
    """

    def __init__(self, model: Any, conditions: Hashable, length: int) -> None:
        self.tuner = make_tuner()
        self._model, self._conditions, self._length = model, conditions, length
        self._rows = 0
        self._lag = 0.0
        self._is_observed = False

    def choose(self, rows: int) -> int:
        """Canvases of the next pass, which computes `rows` rows with one canvas each."""
        if rows > self._rows:
            self.tuner = keep(self._model, (self._conditions, rows), make_tuner)
            self._rows = rows
            self._lag = lag_of_slowest(rows, self._length)
        self._is_observed = rows == self._rows
        return self._find_best(CANDIDATES[-1] if self._is_observed else 1)

    def _find_best(self, most: int) -> int:
        return self.tuner.choose(most, lag=self._lag)

    def observe(self, number: int, gains: Sequence[float], seconds: float) -> None:
        """Measure the pass just chosen: what a row gained on average with 1, 2, 4, … canvases."""
        if not self._is_observed:
            return
        for tried, gain in zip(CANDIDATES, gains):
            self.tuner.learn(tried, gain)
        self.tuner.add(number, seconds, gains[-1])

    def describe(self) -> str:
        tuner = self.tuner
        best = self._find_best(1)
        shown = max((n for n in CANDIDATES if tuner.cost(n) is not None), default=1)
        if shown == 1:
            return "1 canvas a pass, too few slots for a trial of 2"
        shown = best if best > 1 else shown
        cost = f"{tuner.cost(shown):.2f} times as long as 1 and gain {tuner.gain(shown):.2f} slots"
        if best == 1:
            return f"1 canvas a pass: {shown} take {cost}"
        return f"{best} canvases a pass: they take {cost}"
