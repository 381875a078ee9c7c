"""Window sizes: how many tokens the next pass of a window run processes."""

from __future__ import annotations

import time
from statistics import NormalDist
from typing import TYPE_CHECKING

from mmaccel.samplers.tuner import Tuner, keep

if TYPE_CHECKING:
    from mmaccel.samplers.window.run import WindowRun

CANDIDATES = (1, 8, 16, 32, 64)
SHORT = (1, 4, 8, 16, 32)  # those of a short run, beside its length
SPREAD = 0.7  # standard deviation of a row's tokens a pass, as a share of their mean
_STAY = 8  # passes at a width before another is taken; the first continues the width before
_FEW_PASSES = 16
_FEW_TOKENS = 1.15  # a pass
_STRETCH = 64  # slots within which step times are held against each other


class FixedWidth:
    """The widths and the times of a run's steps; here the same width at every pass.

    It `is_cut` to what is still wanted, but not where tokens depend on the width (other rows must
    not change a row's), or where each width is captured as a graph.
    """

    def __init__(self, widest: int, *, is_cut: bool = True) -> None:
        self.widest = widest
        self.is_cut = is_cut
        self._n_open = self._n_tokens = 0
        self._began = time.perf_counter()

    def begin(self, remaining: int) -> int:
        """Begin a step; its width, 0 if no row wants any of the `remaining` slots."""
        self._began = time.perf_counter()
        if not remaining:
            return 0
        return self.choose(remaining if self.is_cut else max(remaining, self.widest))

    def begin_again(self) -> None:
        """Begin a step as wide as the last one, which repeats it."""
        self._began = time.perf_counter()

    def end(self, n_passes: int, n_tokens: int, *, is_usual: bool) -> float:
        """End a step after which all rows together have `n_tokens`; the seconds of a pass."""
        seconds = (time.perf_counter() - self._began) / n_passes
        if is_usual:
            self.observe((n_tokens - self._n_tokens) / n_passes, self._n_open, seconds)
        return seconds

    def go_on(self, n_open: int, n_tokens: int) -> None:
        """Go on with this number of open rows, which have so many tokens."""
        self._n_open = n_open
        self._n_tokens = n_tokens

    def choose(self, remaining: int) -> int:
        """Width of the next pass; `remaining` as in `begin`, at least 1."""
        return min(self.widest, remaining)

    def observe(self, n_tokens: float, n_rows: int, seconds: float) -> None:
        """Learn from a pass that gave `n_tokens` to `n_rows`, which a fixed width does not."""


def make_tuner(candidates: tuple[int, ...] = CANDIDATES) -> Tuner:
    return Tuner(candidates, margin=1.04, spread=SPREAD, risk=0.02, loan=16.0)


class AdaptiveWidth(FixedWidth):
    """The width with the most tokens per second, by a tuner of this run and earlier ones.

    A batch ends with its slowest row. At width 1 all rows advance together; at any other width they
    drift apart while every pass still computes all of them. So the gain of a wider width is lowered
    by the expected lag of the slowest row.
    """

    def __init__(
        self, tuner: Tuner, rows: int = 1, length: int = 256, *, is_cut: bool = True
    ) -> None:
        super().__init__(CANDIDATES[-1], is_cut=is_cut)
        self._tuner = tuner
        self._lag = lag_of_slowest(rows, length)
        self._length = length
        self._stage = 0
        self._current = CANDIDATES[0]
        self._stayed = 0
        self._is_narrowed = False

    def choose(self, remaining: int) -> int:
        kept = self._current if 0 < self._stayed < _STAY else None
        width = self._tuner.choose(remaining, lag=self._lag, kept=kept)
        if width != self._current:
            self._current = width
            self._stayed = 0
        self._is_narrowed = remaining < self._current
        self._stage = max(self._length - remaining, 0) // _STRETCH
        return min(self._current, remaining)

    def observe(self, n_tokens: float, n_rows: int, seconds: float) -> None:
        if self._is_narrowed or not n_rows:  # narrower than its width: no measurement of it
            return
        self._stayed += 1
        if self._stayed > 1 or self._current == 1:  # else the drafts are of another width
            self._tuner.learn(self._current, n_tokens, n_rows)
        self._tuner.add(self._current, seconds, n_tokens / n_rows, self._stage)


class RunWidth(FixedWidth):
    """The width of a whole run, such as a frame of codes, with too few passes to measure one: a
    run's mean pass is measured, for the runs that follow. All widths have the graphs of the widest.
    """

    def __init__(self, tuner: Tuner, rows: int, length: int, *, is_cut: bool = True) -> None:
        super().__init__(CANDIDATES[-1], is_cut=is_cut)
        self.width = tuner.choose(length)
        self._tuner = tuner
        self._rows = rows
        self._n_made = 0
        self._n_passes = 0
        self._seconds = 0.0
        self._is_usual = True

    def begin(self, remaining: int) -> int:
        if not remaining and self._is_usual:
            # of a row; one of several may have waited for others, or ended before all its slots
            gained = self._n_made / self._rows
            self._tuner.learn(self.width, gained, self._n_passes)
            self._tuner.add(self.width, self._seconds / self._n_passes, gained / self._n_passes)
        return super().begin(remaining)

    def choose(self, remaining: int) -> int:
        return min(self.width, remaining)

    def end(self, n_passes: int, n_tokens: int, *, is_usual: bool) -> float:
        seconds = super().end(n_passes, n_tokens, is_usual=is_usual)
        self._n_made = n_tokens
        self._n_passes += n_passes
        self._seconds += seconds * n_passes
        self._is_usual &= is_usual
        return seconds


def lag_of_slowest(rows: int, length: int) -> float:
    """By how much the slowest of `rows` rows of `length` slots lags behind their mean, for one
    token a pass (Blom's approximation of the maximum of n normal values).
    """
    slowest = NormalDist().inv_cdf((rows - 0.375) / (rows + 0.25))
    return SPREAD * max(slowest, 0.0) / length**0.5


def open_chooser(run: WindowRun) -> FixedWidth:
    """What chooses the widths of a run. "adaptive" is the widest where the drafts choose."""
    policy = run.policy
    prompt = run.prompt
    source = run.drafter.source
    is_cut = policy.exactness == "bitwise" and not run.runner.is_static  # one graph for each width
    if policy.window != "adaptive":
        return FixedWidth(int(policy.window), is_cut=is_cut)
    if source.chooses_widths:
        return FixedWidth(CANDIDATES[-1], is_cut=is_cut)
    params = run.params
    guidance = prompt.branches, params.guidance_scale
    conditions = (prompt.batch, *guidance, source, params.temperature, params.rules)
    if prompt.layout is not None and run.scheduler is None and run.length < _STRETCH:
        candidates = (*(each for each in SHORT if each < run.length), run.length)
        short: Tuner = keep(run.model, (candidates, *conditions), lambda: make_tuner(candidates))
        return RunWidth(short, prompt.batch, run.length, is_cut=is_cut)
    tuner: Tuner = keep(run.model, conditions, make_tuner)
    if run.model.is_text and prompt.layout is None:  # one text says little of another
        tuner.forget_gains()
    return AdaptiveWidth(tuner, prompt.batch, run.length, is_cut=is_cut)


def note_lost_width(run: WindowRun) -> None:
    """Say it where nearly all drafts of a text were wrong, and every pass was a wide one."""
    stats = run.stats
    window = run.policy.window
    is_text = run.model.is_text and run.prompt.layout is None
    is_wide = isinstance(window, int) and window > 1 and stats.passes >= _FEW_PASSES
    if not is_text or not run.policy.freezes_noise or run.drafter.source.chooses_widths:
        return
    if is_wide and stats.tokens_per_pass < _FEW_TOKENS:
        stats.notes.append(
            f"window={window}: {stats.tokens_per_pass:.2f} tokens a pass; give a narrower one, "
            "or drafts='suffix', which makes passes wide only where that pays"
        )
