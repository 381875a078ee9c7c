"""Window widths: what a window loop asks how wide the next pass is to be.

The adaptive chooser has a file of its own, `mmaccel.samplers.window.window_size`.

The adaptive window width, chosen while running from what passes really cost.

Wide windows decode more tokens a pass and cost more; where the best width lies depends on the
machine, the batch and the image. The adaptive chooser measures both and takes the width with the
most tokens per second, by the rule of discounted upper confidence bounds (A. Garivier, E.
Moulines, "On Upper-Confidence Bound Policies for Switching Bandit Problems", ALT 2011, arXiv
0805.3415) over neighbouring widths. It may only serve a sampler whose output does not depend on
the width.

Departures: widths are climbed from 1 upwards, so that what does not pay is tried once and given up;
a width is kept for a few passes, since its first pass still feeds on the drafts of the one before;
a bound is a share of the rate, as tokens and seconds have no common scale.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from statistics import NormalDist, median
from typing import Any
from weakref import WeakKeyDictionary

_KEYS = 64  # conditions remembered per model; the oldest goes first
CANDIDATES = (1, 8, 16, 32, 64)
_TRIAL = 8  # passes of a row at a width before another is considered
_FORGET = 0.998  # weight of a pass after the next one
_LATEST = 9  # passes whose median is a width's seconds
_GAIN = 1.1  # how much faster than width 1 another must be to be preferred: machines are noisy
_PLAIN = 5  # passes at width 1, with which everything is compared, before another is tried
_AGAIN = 1000  # passes after which a neighbour of the best width is tried again, ...
_SOON = 100  # ... and after which, if it is not certain that it loses to width 1
_SECOND = 400  # ... and after which one is tried again that was judged by few passes
_ENOUGH = 3  # timed passes that are not few: one hiccup among them decides nothing
_SPREAD = 0.7  # standard deviation of a row's tokens a pass, as a share of their mean


@dataclass
class Record:
    """What is known of one width.

    Attributes:
        tokens: gained at this width, old passes counting less.
        row_passes: in which they were gained: one per unfinished row and pass, weighted likewise.
        latest: seconds of the latest passes; a machine's hiccups do not move their median.
        seen: number of the last pass at this width.
        tried: whether there was a pass; the first of a width pays for allocations.
    """

    tokens: float = 0.0
    row_passes: float = 0.0
    seen: int = 0
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))
    tried: bool = False

    @property
    def rate(self) -> float | None:
        """Tokens per second and row; None where nothing was measured."""
        if not self.row_passes or not self.latest:
            return None
        return self.tokens / self.row_passes / max(median(self.latest), 1e-9)

    @property
    def doubt(self) -> float:
        """Standard error of the tokens a pass, as a share of them."""
        return _SPREAD / max(self.row_passes, 1e-9) ** 0.5


@dataclass
class Records:
    """What is known of all widths; outlives a run, so that the next one starts with it."""

    of: dict[int, Record] = field(default_factory=lambda: {w: Record() for w in CANDIDATES})
    passes: int = 0


class AdaptiveWidth:
    """Takes the width that finishes the batch first.

    A batch is finished with its slowest row. At width 1 all rows keep step; at any other they drift
    apart, and their passes go on being paid for by all, so a wider width has to win by more than
    the slowest row is expected to lag (Blom's approximation of the greatest of n normal values).

    Args:
        rows: B.
        length: slots per row.
        records: what earlier runs learnt; it is read and written. None starts anew.
    """

    def __init__(self, rows: int = 1, length: int = 256, records: Records | None = None) -> None:
        self.records = Records() if records is None else records
        self.widest = CANDIDATES[-1]
        extreme = NormalDist().inv_cdf((rows - 0.375) / (rows + 0.25))
        self._lag = _SPREAD * max(extreme, 0.0) / length**0.5
        self._stay = 1 + max(2, -(-_TRIAL // rows))  # the first is owed to the width before
        self._current = CANDIDATES[0]
        self._stayed = self._stay
        self._cut = False

    def rate(self, width: int) -> float | None:
        """Tokens per second and row until the slowest row is done; None before it was measured."""
        record = self.records.of[width]
        if record.rate is None or width == 1:
            return record.rate
        return record.rate / _GAIN / (1 + self._lag * (record.tokens / record.row_passes) ** 0.5)

    def choose(self, remaining: int) -> int:
        """Width of the next pass; `remaining` >= 1 is the longest unfinished row's rest."""
        if self._stayed >= self._stay or self._is_hopeless(self._current):
            chosen = self._select(remaining)
            if chosen != self._current:
                self._current, self._stayed = chosen, 0
        self._cut = remaining < self._current
        return min(self._current, remaining)

    def observe(self, n_tokens: float, n_rows: int, seconds: float) -> None:
        """Learn from the pass just chosen.

        Args:
            n_tokens: tokens gained.
            n_rows: rows that were unfinished.
            seconds: wall time.
        """
        if self._cut or not n_rows:  # the end of an image is like no other pass
            return
        self._stayed += 1
        record = self.records.of[self._current]
        if self._is_stale(self._current):
            record.latest.clear()  # the machine may have changed
        self.records.passes += 1
        record.seen = self.records.passes
        if not record.tried:
            record.tried = True
            return
        record.latest.append(seconds)
        if self._stayed == 1 and record.row_passes and self._current > 1:
            return  # these tokens are owed to the width before
        for other in self.records.of.values():
            other.tokens *= _FORGET
            other.row_passes *= _FORGET
        record.tokens += n_tokens
        record.row_passes += n_rows

    def _age(self, width: int) -> int:
        return self.records.passes - self.records.of[width].seen

    def _is_stale(self, width: int) -> bool:
        """What is known of a width is to be measured anew."""
        is_sure = len(self.records.of[width].latest) >= _ENOUGH
        return self._age(width) > (_AGAIN if is_sure else _SECOND)

    def _is_hopeless(self, width: int) -> bool:
        """Width 1 is better than this one, whatever more passes may say."""
        plain, here = self.rate(1), self.rate(width)
        doubt = self.records.of[width].doubt
        return plain is not None and here is not None and here * (1 + 2 * doubt) < plain

    def _select(self, remaining: int) -> int:
        """The most promising of the best width and its neighbours; none is tried that the end of
        the row would cut.
        """
        known = {w: rate for w in CANDIDATES if (rate := self.rate(w)) is not None}
        if len(self.records.of[1].latest) < _PLAIN:
            return 1
        place = CANDIDATES.index(max(known, key=lambda w: known[w]))
        around = CANDIDATES[max(place - 1, 0) : place + 2]
        for width in around:
            if (width not in known or self._is_stale(width)) and width <= remaining:
                return width
        around = tuple(width for width in around if width in known)
        if place == 0:  # no hope is put into more than 1: it must not lose to the plain loop
            next_width = around[-1]
            again = self._age(next_width) > _SOON and not self._is_hopeless(next_width)
            return next_width if again and next_width <= remaining else 1
        return max(around, key=lambda w: known[w] * (1 + self.records.of[w].doubt * (w > 1)))


_LEARNT: WeakKeyDictionary[Any, dict[Hashable, Records]] = WeakKeyDictionary()


def recall(model: Any, key: Hashable) -> Records:
    """What runs of a model under the same conditions have learnt, as long as the model lives.

    Args:
        model: a token model; one that wraps another in its attribute `model` shares what it learnt
            with every other wrapper of it. One that cannot be a weak key learns anew every time.
        key: what else rates depend on, such as the number of rows.
    """
    try:
        known = _LEARNT.setdefault(getattr(model, "model", model), {})
    except TypeError:
        return Records()
    if key not in known and len(known) >= _KEYS:
        del known[next(iter(known))]
    return known.setdefault(key, Records())


class FixedWidth:
    """Always the same width, but never wider than what is still wanted."""

    def __init__(self, width: int) -> None:
        self.widest = width

    def choose(self, remaining: int) -> int:
        """Width of the next pass; `remaining` >= 1 is the longest unfinished row's rest."""
        return min(self.widest, remaining)

    def observe(self, n_tokens: float, n_rows: int, seconds: float) -> None:
        """Nothing to learn."""


class ConstantWidth(FixedWidth):
    """Always the same width, beyond a row's end too.

    For samplers whose tokens depend on the width: how far a batch reaches must not enter a row.
    """

    def choose(self, remaining: int) -> int:
        """Width of the next pass, whatever remains."""
        return self.widest


def make_chooser(
    window: int | str,
    exactness: str,
    rows: int = 1,
    length: int = 256,
    records: Records | None = None,
) -> FixedWidth | AdaptiveWidth:
    """What chooses the widths of a run.

    Args:
        window: the policy's window, "adaptive" or an integer.
        exactness: the policy's promise; only tokens that are bitwise the plain loop's allow the
            width to follow the rows' ends.
        rows, length, records: see `AdaptiveWidth`.
    """
    if window == "adaptive":
        return AdaptiveWidth(rows, length, records)
    return FixedWidth(int(window)) if exactness == "bitwise" else ConstantWidth(int(window))
