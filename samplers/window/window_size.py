"""Window sizes: how many tokens the next pass of a window run processes.

A fixed window is a number. The adaptive window is calibrated: the first passes of a model under
given conditions run at several widths, their seconds and their tokens are measured, and the width
with the most tokens per second serves from then on. The calibration is kept as long as the model
lives. It is repeated when the measured step time drifts, because another process took the CPU or
the GPU changed its clock. Only a policy whose tokens do not depend on the width may use it.

The calibration has two parts. *Timing* runs a few passes per width, from narrow to wide, and stops
where wider passes cannot win any more. *Comparing* alternates between the widths whose measured
rates lie within each other's uncertainty, until each has enough passes. Both parts decode real
tokens, so nothing is computed twice.

A pass takes longer the more tokens its rows have, because it reads their keys and values. So width
1, which is timed first, is timed again among those that are compared, and the present step time is
held against that of earlier passes in the same stretch of a run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from statistics import NormalDist, median
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary

from mmaccel.contracts import Prompt, TokenModel
from mmaccel.results import Exactness
from mmaccel.samplers.sampling_params import SamplingParams

CANDIDATES = (1, 8, 16, 32, 64)
_TIMED = 4  # timed passes of a width before it is judged
_COMPARED = 64  # row-passes of a contender after which the calibration ends
_STAY = 8  # passes at a width before another is taken; the first continues the width before
_SPREAD = 0.7  # standard deviation of a row's tokens a pass, as a share of their mean
_MARGIN = 1.04  # how much faster than width 1 another width has to be: clocks are noisy
_HOPELESS = 0.7  # share of the best rate below which no wider width is tried
_RECENT = 15  # passes whose median is the present step time
_DRIFT = 1.35  # factor by which the step time may change before everything is timed again
_STRETCH = 64  # slots within which step times are held against each other
_MAX_CALIBRATIONS = 64  # per model; the oldest is dropped first


class Widths(Protocol):
    """Chooses the widths of a run.

    Attributes:
        widest: the widest there will be.
    """

    widest: int


class Sized(Protocol):
    """A policy, as far as its widths depend on it.

    Attributes:
        exactness: what it guarantees.
        window: tokens processed per pass, or "adaptive".
    """

    exactness: ClassVar[Exactness]
    window: int | str


class FixedWidth:
    """The same width at every pass, cut to what is still wanted."""

    def __init__(self, width: int) -> None:
        self.widest = width

    def choose(self, remaining: int) -> int:
        """Width of the next pass.

        Args:
            remaining: tokens that the longest unfinished row still wants, at least 1.
        """
        return min(self.widest, remaining)

    def observe(self, n_tokens: float, n_rows: int, seconds: float) -> None:
        """A fixed width learns nothing from a pass."""


class ConstantWidth(FixedWidth):
    """The same width at every pass, also past a row's end.

    It serves policies whose tokens depend on the width: the lengths of the other rows of a batch
    must not change a row's tokens.
    """

    def choose(self, remaining: int) -> int:
        """Width of the next pass, whatever remains."""
        return self.widest


@dataclass
class WidthStats:
    """What was measured of one width.

    Attributes:
        tokens: accepted at this width, summed over rows.
        row_passes: passes they were accepted in, summed over unfinished rows.
        seconds: of the latest passes; the median of them is the step time.
        was_run: whether a pass ran at this width. The first one allocates and is not timed.
    """

    tokens: float = 0.0
    row_passes: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    was_run: bool = False

    @property
    def tokens_per_pass(self) -> float:
        """Tokens a row gains in a pass; 0.0 before any was measured."""
        return self.tokens / self.row_passes if self.row_passes else 0.0

    @property
    def doubt(self) -> float:
        """Standard error of `tokens_per_pass`, as a share of it."""
        return _SPREAD / max(self.row_passes, 1) ** 0.5


@dataclass
class Calibration:
    """Measurements of one model under one set of conditions; they outlive a run.

    Attributes:
        widths: by width.
        chosen: the calibrated width; None while the calibration lasts.
        recent: seconds of the latest passes of the chosen width, by stretch of the run.
        step_seconds: step time of the chosen width when it was first known, by stretch.
    """

    widths: dict[int, WidthStats] = field(
        default_factory=lambda: {width: WidthStats() for width in CANDIDATES}
    )
    chosen: int | None = None
    recent: dict[int, deque[float]] = field(default_factory=dict)
    step_seconds: dict[int, float] = field(default_factory=dict)

    def forget_tokens(self) -> None:
        """Choose anew by what is accepted from now on; the seconds of passes stay."""
        self.chosen = None
        for stats in self.widths.values():
            stats.tokens, stats.row_passes = 0.0, 0

    def forget_seconds(self) -> None:
        """Time all widths again; the tokens that were counted stay."""
        self.chosen = None
        for stats in self.widths.values():
            stats.seconds.clear()
        self.recent.clear()
        self.step_seconds.clear()


class AdaptiveWidth:
    """Calibrates the width once and then keeps it.

    A batch ends with its slowest row. At width 1 all rows advance together; at any other width they
    drift apart while every pass still computes all of them. So the rate of a wider width is lowered
    by the expected lag of the slowest row (Blom's approximation of the maximum of n normal values).

    Args:
        rows: B.
        length: slots per row.
        calibration: of earlier runs; it is read and written. None starts a new one.
    """

    def __init__(
        self, rows: int = 1, length: int = 256, calibration: Calibration | None = None
    ) -> None:
        self.calibration = Calibration() if calibration is None else calibration
        self.widest = CANDIDATES[-1]
        self._lag = lag_of_slowest(rows, length)
        self._length = length
        self._stretch = 0
        self._current = CANDIDATES[0]
        self._stayed = 0
        self._is_cut = False

    def rate(self, width: int) -> float | None:
        """Tokens per second of the slowest row; None while the width has no timed pass."""
        stats = self.calibration.widths[width]
        if not stats.seconds or not stats.row_passes:
            return None
        rate = stats.tokens_per_pass / max(median(stats.seconds), 1e-9)
        return rate if width == 1 else rate / (1 + self._lag * stats.tokens_per_pass**0.5)

    def choose(self, remaining: int) -> int:
        """Width of the next pass; see `FixedWidth.choose`."""
        width = self._choose_width(remaining)
        if width != self._current:
            self._current = width
            self._stayed = 0
        self._is_cut = remaining < width
        self._stretch = max(self._length - remaining, 0) // _STRETCH
        return min(width, remaining)

    def observe(self, n_tokens: float, n_rows: int, seconds: float) -> None:
        """Measure the pass just chosen.

        Args:
            n_tokens: accepted, summed over rows.
            n_rows: rows that were unfinished.
            seconds: wall time of the pass.
        """
        if self._is_cut or not n_rows:  # narrower than its width: no measurement of it
            return
        stats = self.calibration.widths[self._current]
        self._stayed += 1
        if not stats.was_run:
            stats.was_run = True
            return
        stats.seconds.append(seconds)
        if self._stayed > 1 or self._current == 1:  # else the drafts are of another width
            stats.tokens += n_tokens
            stats.row_passes += n_rows
        if self._current == self.calibration.chosen:
            self._check_drift(seconds)

    def _check_drift(self, seconds: float) -> None:
        """Time all widths again when the step time of the chosen one has changed for long."""
        calibration = self.calibration
        stretch = self._stretch
        recent = calibration.recent.setdefault(stretch, deque(maxlen=_RECENT))
        recent.append(seconds)
        if len(recent) < _RECENT:
            return
        now = median(recent)
        before = calibration.step_seconds.setdefault(stretch, now)
        if not 1 / _DRIFT < now / max(before, 1e-9) < _DRIFT:
            calibration.forget_seconds()

    def _choose_width(self, remaining: int) -> int:
        calibration = self.calibration
        if calibration.chosen is not None:
            return calibration.chosen
        stats = calibration.widths[self._current]
        is_begun = 0 < self._stayed < _STAY and len(stats.seconds) >= _TIMED
        if is_begun and not self._is_hopeless(self._current):
            return self._current
        untimed = self._find_untimed()
        if untimed is not None and untimed <= remaining:
            return untimed
        rates = {w: rate for w in CANDIDATES if (rate := self.rate(w)) is not None}
        if not rates:
            return CANDIDATES[0]
        if untimed is None:
            unsure = self._find_unsure(rates)
            if unsure is None:
                self._finish(rates)
                return self._best(rates)
            if unsure <= remaining:
                return unsure
        return self._best(rates)

    def _find_untimed(self) -> int | None:
        """The narrowest width that is still to be timed; None once all that may win are."""
        best = 0.0
        for width in CANDIDATES:
            rate = self.rate(width)
            if self._is_hopeless(width):
                return None
            if rate is None or len(self.calibration.widths[width].seconds) < _TIMED:
                return width
            if rate < _HOPELESS * best:
                return None  # and wider ones cost more
            best = max(best, rate)
        return None

    def _is_hopeless(self, width: int) -> bool:
        """Whether a width loses to width 1 even if all its tokens were accepted, or for certain."""
        plain = self.rate(1)
        stats = self.calibration.widths[width]
        if width == 1 or plain is None or len(stats.seconds) < 2:  # one pass may be a hiccup
            return False
        most = stats.tokens_per_pass * (1 + 2 * stats.doubt) if stats.row_passes else width
        return min(most, width) / min(stats.seconds) < plain

    def _find_unsure(self, rates: dict[int, float]) -> int | None:
        """The least measured width that may be the best; None if all such have enough passes.

        At width 1 only the seconds are uncertain.
        """
        widths = self.calibration.widths
        doubt = {width: 0.0 if width == 1 else 2 * widths[width].doubt for width in rates}
        floor = max(rate * (1 - doubt[width]) for width, rate in rates.items())
        contenders = [w for w, rate in rates.items() if rate * (1 + doubt[w]) >= floor]
        if contenders == [1]:
            return None
        if 1 in contenders and len(widths[1].seconds) < _RECENT:
            return 1
        unsure = [w for w in contenders if w > 1 and widths[w].row_passes < _COMPARED]
        return min(unsure, key=lambda w: widths[w].row_passes, default=None)

    def _best(self, rates: dict[int, float]) -> int:
        return max(rates, key=lambda w: rates[w] * (_MARGIN if w == 1 else 1.0))

    def _finish(self, rates: dict[int, float]) -> None:
        calibration = self.calibration
        calibration.chosen = self._best(rates)


def lag_of_slowest(rows: int, length: int) -> float:
    """By how much the slowest of `rows` rows of `length` slots lags behind their mean, for one
    token a pass; n tokens a pass lag sqrt(n) times as much.
    """
    slowest = NormalDist().inv_cdf((rows - 0.375) / (rows + 0.25))
    return _SPREAD * max(slowest, 0.0) / length**0.5


def make_chooser(
    window: int | str,
    exactness: str,
    rows: int = 1,
    length: int = 256,
    calibration: Calibration | None = None,
) -> FixedWidth | AdaptiveWidth:
    """What chooses the widths of a run.

    Args:
        window: the policy's window, "adaptive" or an integer.
        exactness: of the policy. Only "bitwise" lets the width follow the rows' ends.
        rows, length, calibration: see `AdaptiveWidth`.
    """
    if window == "adaptive":
        return AdaptiveWidth(rows, length, calibration)
    return FixedWidth(int(window)) if exactness == "bitwise" else ConstantWidth(int(window))


def open_chooser(
    policy: Sized,
    model: TokenModel,
    prompt: Prompt,
    length: int,
    params: SamplingParams,
    source: Hashable,
    *,
    is_chosen: bool = False,
) -> FixedWidth | AdaptiveWidth:
    """What chooses the widths of a run.

    Args:
        policy, model, prompt, length, params: of the run.
        source: what its drafts come from.
        is_chosen: whether the source chooses; "adaptive" is then the widest.
    """
    calibration = None
    if policy.window == "adaptive" and is_chosen:
        return FixedWidth(CANDIDATES[-1])
    if policy.window == "adaptive":
        conditions = (
            prompt.batch,
            prompt.branches,
            source,
            params.guidance_scale,
            params.temperature,
            params.rules,
        )
        calibration = find_calibration(model, conditions)
        if model.is_text and prompt.layout is None:  # one text says little of another
            calibration.forget_tokens()
    return make_chooser(policy.window, policy.exactness, prompt.batch, length, calibration)


_CALIBRATIONS: WeakKeyDictionary[Any, dict[Hashable, Any]] = WeakKeyDictionary()


def find_calibration(
    model: Any, conditions: Hashable, make: Callable[[], Any] = Calibration
) -> Any:
    """The calibration of a model under some conditions, kept as long as the model lives.

    Args:
        model: a token model. One that wraps another in its attribute `model` shares calibrations
            with every other wrapper of it. One that cannot be weakly referenced gets a new one.
        conditions: what else rates depend on, such as the number of rows.
        make: a new one; what is kept under equal conditions was made by the same function.
    """
    try:
        known = _CALIBRATIONS.setdefault(model if model.model is None else model.model, {})
    except TypeError:
        return make()
    if conditions not in known and len(known) >= _MAX_CALIBRATIONS:
        del known[next(iter(known))]
    return known.setdefault(conditions, make())


class StepPace:
    """The widths of the steps of a run.

    Args:
        chooser: chooses them.
        is_static: whether steps are captured, one graph for each width.
        n_open: rows that are decoded at the beginning.
    """

    def __init__(
        self, chooser: FixedWidth | AdaptiveWidth, *, is_static: bool, n_open: int
    ) -> None:
        self.chooser = chooser
        self._is_static = is_static
        self._n_open = n_open
        self._n_tokens = 0  # of all rows so far
        self._began = time.perf_counter()

    def begin(self, remaining: int) -> int:
        """Begin a step; returns its width.

        Args:
            remaining: slots that the row which wants most still wants; 0 ends the run.
        """
        self._began = time.perf_counter()
        if not remaining:
            return 0
        if self._is_static:  # a graph for each width: none for a row's end alone
            remaining = max(remaining, self.chooser.widest)
        return self.chooser.choose(remaining)

    def begin_again(self) -> None:
        """Begin a step as wide as the last one, which repeats it."""
        self._began = time.perf_counter()

    def end(self, n_passes: int, n_tokens: int, *, is_usual: bool) -> float:
        """End a step; returns the seconds of a pass.

        Args:
            n_passes: passes since the last synchronisation.
            n_tokens: of all rows so far.
            is_usual: whether they took as long as others like them will.
        """
        seconds = (time.perf_counter() - self._began) / n_passes
        if is_usual:
            gained = (n_tokens - self._n_tokens) / n_passes
            self.chooser.observe(gained, self._n_open, seconds)
        return seconds

    def go_on(self, n_open: int, n_tokens: int) -> None:
        """Go on with this number of open rows, which have so many tokens."""
        self._n_open = n_open
        self._n_tokens = n_tokens
