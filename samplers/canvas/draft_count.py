"""Draft counts: how many canvases the next pass of nested drafts computes.

A pass over K canvases gains 1 to K slots. How much longer than a pass over one canvas it takes
depends on the machine: hardly where arithmetic is idle, K times where it is not. A fixed number
stays. A measured one is the number with the most slots per second, found out by trials, in passes
that decode real slots. Only a policy whose tokens do not depend on it may use it.

Numbers are tried from small to large, each in two passes. The next number is tried only if it may
win: if it gained twice the slots of the last one, and each further canvas took as long as the last
ones did. Trials are paid out of an allowance, a share of the seconds that one canvas a pass takes.
What passes of several canvases have lost so far, and what the trial may lose, have to fit in. So
decoding takes longer than with one canvas a pass by that share at most, up to the noise of the
clock.

Drafts are nested, so that a pass of K canvases also tells what fewer would have gained.
Measurements are kept as long as the model lives, as those of adaptive windows are
(`mmaccel.samplers.window.window_size`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, ClassVar

from mmaccel.samplers.window.window_size import WidthStats, find_calibration, lag_of_slowest

CANDIDATES = (1, 2, 4, 8)
_TIMED = 2  # passes of a number before it is judged
_ALLOWANCE = 0.02  # share of the seconds of one canvas a pass that may be lost
_MARGIN = 1.04  # how much faster than one canvas a pass a number has to be: clocks are noisy
_RECENT = 15  # passes whose median is the present step time
_DRIFT = 1.35  # factor by which the step time may change before everything is timed again


class FixedDrafts:
    """The same number at every pass."""

    is_measured: ClassVar[bool] = False

    def __init__(self, number: int) -> None:
        self.most = number

    def choose(self, rows: int) -> int:
        """Canvases of the next pass.

        Args:
            rows: rows that a pass over one canvas computes.
        """
        return self.most

    def observe(self, number: int, gains: Sequence[float], seconds: float) -> None:
        """A fixed number learns nothing from a pass."""

    def describe(self) -> str:
        """What was chosen, for `Stats.drafts`; nothing was."""
        return ""


@dataclass
class DraftCosts:
    """Measurements of one model under one set of conditions; they outlive a run.

    Attributes:
        numbers: by canvases of a pass.
        judged: step time of a number when it was first known.
        plain_seconds: what the slots that were gained take at one canvas a pass.
        lost: seconds that passes of several canvases took beyond that; below 0 where they saved.
    """

    numbers: dict[int, WidthStats] = field(
        default_factory=lambda: {number: WidthStats() for number in CANDIDATES}
    )
    judged: dict[int, float] = field(default_factory=dict)
    plain_seconds: float = 0.0
    lost: float = 0.0

    def seconds(self, number: int) -> float | None:
        """Step time of a number, the least disturbed of its latest passes; None before it is
        judged.
        """
        recent = self.numbers[number].seconds
        return min(recent) if len(recent) >= _TIMED else None

    def gain(self, number: int) -> float:
        """Slots that a row gains in a pass."""
        return max(self.numbers[number].tokens_per_pass, 1.0)

    def check_drift(self, number: int) -> None:
        """Time all numbers again when the step time of one has changed for long."""
        recent = self.numbers[number].seconds
        if len(recent) < _RECENT:
            return
        now = median(recent)
        before = self.judged.setdefault(number, now)
        if not 1 / _DRIFT < now / max(before, 1e-9) < _DRIFT:
            self.judged.clear()
            for stats in self.numbers.values():
                stats.seconds.clear()


class MeasuredDrafts(FixedDrafts):
    """The number with the most slots per second.

    Passes are measured while they compute as many rows as the widest one so far; a pass of fewer
    rows takes what was best for these.

    Args:
        model: measurements are kept for it.
        conditions: what else they depend on, but for the number of rows.
        length: slots of a row.

    Attributes:
        most: the largest number there is.
        costs: what was measured.
    """

    is_measured = True

    def __init__(self, model: Any, conditions: Hashable, length: int) -> None:
        super().__init__(CANDIDATES[-1])
        self.costs = DraftCosts()
        self._model, self._conditions, self._length = model, conditions, length
        self._rows = 0
        self._lag = self._earlier = 0.0
        self._is_observed = False

    def choose(self, rows: int) -> int:
        if rows > self._rows:
            conditions = (self._conditions, rows)
            self.costs = find_calibration(self._model, conditions, DraftCosts)
            self._rows, self._earlier = rows, self.costs.plain_seconds
            self._lag = lag_of_slowest(rows, self._length)
        self._is_observed = rows == self._rows
        plain = self.costs.seconds(1)
        if plain is None:
            return 1
        left = _ALLOWANCE * (self._earlier + plain * self._length) - self.costs.lost
        trial = self._find_trial()
        if self._is_observed and trial is not None and self._most_loss(trial) <= left:
            return trial
        return self._find_best() if left >= 0 else 1

    def observe(self, number: int, gains: Sequence[float], seconds: float) -> None:
        """Measure the pass just chosen.

        Args:
            number: canvases that it computed.
            gains: slots that a row gained on average with 1, 2, 4, ... canvases, up to `number`.
            seconds: wall time of the pass.
        """
        if not self._is_observed:
            return
        costs = self.costs
        costs.numbers[number].seconds.append(seconds)
        for tried, gain in zip(CANDIDATES, gains):
            costs.numbers[tried].tokens += gain
            costs.numbers[tried].row_passes += 1
        plain = costs.seconds(1)
        if plain is not None:
            costs.plain_seconds += gains[-1] * plain
            costs.lost += seconds - gains[-1] * plain if number > 1 else 0.0
        costs.check_drift(number)

    def describe(self) -> str:
        """The present choice and what it rests on."""
        plain = self.costs.seconds(1)
        best = self._find_best()
        judged = [number for number in CANDIDATES[1:] if self.costs.seconds(number) is not None]
        if plain is None or not judged:
            return "1 canvas a pass, too few slots for a trial of 2"
        shown = best if best > 1 else judged[-1]
        seconds = self.costs.seconds(shown)
        assert seconds is not None
        cost = (
            f"{seconds / plain:.2f} times as long as 1 and gain {self.costs.gain(shown):.2f} slots"
        )
        if best == 1:
            return f"1 canvas a pass: {shown} take {cost}"
        return f"{best} canvases a pass: they take {cost}"

    def _rate(self, number: int, gain: float, seconds: float) -> float:
        """Slots per second of the slowest row."""
        if number == 1:
            return _MARGIN / max(seconds, 1e-9)
        return gain / (1 + self._lag * gain**0.5) / max(seconds, 1e-9)

    def _rates(self) -> dict[int, float]:
        """By number, of those that are judged."""
        found = {}
        for number in CANDIDATES:
            seconds = self.costs.seconds(number)
            if seconds is not None:
                found[number] = self._rate(number, self.costs.gain(number), seconds)
        return found

    def _find_best(self) -> int:
        rates = self._rates()
        return max(rates, key=lambda number: rates[number], default=1)

    def _find_trial(self) -> int | None:
        """The smallest number that is still to be judged, if it may win; None otherwise."""
        rates = self._rates()
        number = next((n for n in CANDIDATES if n not in rates), None)
        if number is None or number <= 2:  # nothing is known of what a further canvas takes
            return number
        most = 2 * self.costs.gain(number // 2)
        may_win = self._rate(number, most, self._predict(number)) > max(rates.values())
        return number if may_win else None

    def _predict(self, number: int) -> float:
        """Step time of a number that is still to be judged; the smaller ones are."""
        measured = self.costs.numbers[number].seconds
        last = self.costs.seconds(number // 2)
        assert last is not None
        if measured:
            return min(measured)
        before = 0.0 if number == 2 else self.costs.seconds(number // 4)
        assert before is not None
        return last + max(last - before, 0.0) * (1 if number == 2 else 2)

    def _most_loss(self, number: int) -> float:
        """Seconds that a trial loses if the further canvases gain nothing."""
        plain = self.costs.seconds(1)
        assert plain is not None
        return self._predict(number) - self.costs.gain(number // 2) * plain
