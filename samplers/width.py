"""Window widths: fixed, or chosen while running from what passes really cost.

Wide windows decode more tokens a pass and cost more; where the best width lies depends on the
machine, the batch and the picture. The adaptive chooser measures both and takes the width with the
most tokens per second. It may only serve a sampler whose output does not depend on the width.
"""

from __future__ import annotations

CANDIDATES = (1, 8, 16, 32, 64)
_TRIALS = 2  # measured passes of a width before its rate is believed
_RECHECK = 24  # passes after which a neighbour of the best width is tried again
_MEMORY = 0.7  # weight of the past in the running means


class FixedWidth:
    """Always the same width, but never wider than what is still wanted."""

    def __init__(self, width: int) -> None:
        self.widest = width

    def choose(self, remaining: int) -> int:
        """Width of the next pass; `remaining` >= 1 is the longest unfinished row's rest."""
        return min(self.widest, remaining)

    def observe(self, width: int, n_tokens: int, seconds: float) -> None:
        """Nothing to learn."""


class ConstantWidth(FixedWidth):
    """Always the same width, beyond a row's end too.

    For samplers whose tokens depend on the width: how far a batch reaches must not enter a row.
    """

    def choose(self, remaining: int) -> int:
        """Width of the next pass, whatever remains."""
        return self.widest


class AdaptiveWidth:
    """Takes the width with the most tokens per second.

    Starts wide in the middle, walks to a neighbour while that is faster, and tries the neighbours
    of the best width again now and then, so that it follows a drifting machine. Seconds and tokens
    are running means per width.
    """

    def __init__(self, candidates: tuple[int, ...] = CANDIDATES) -> None:
        self.candidates = candidates
        self.widest = candidates[-1]
        self._seconds: dict[int, float] = {}
        self._tokens: dict[int, float] = {}
        self._trials: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._passes = 0
        self._current = len(candidates) // 2
        self._since = 0

    def rate(self, width: int) -> float | None:
        """Tokens per second at a width, or None before enough passes were measured."""
        if self._trials.get(width, 0) < _TRIALS:
            return None
        return self._tokens[width] / max(self._seconds[width], 1e-9)

    def choose(self, remaining: int) -> int:
        """Width of the next pass; `remaining` >= 1 is the longest unfinished row's rest."""
        here = self.candidates[self._current]
        if self.rate(here) is not None:
            self._since += 1
            self._current = self._walk()
        return min(self.candidates[self._current], remaining)

    def observe(self, width: int, n_tokens: int, seconds: float) -> None:
        """Learn from a pass: tokens gained over all rows and wall seconds."""
        self._passes += 1
        if width not in self.candidates:  # the end of the picture
            return
        trials = self._trials.get(width, 0)
        if trials == 0:  # the first pass of a shape pays for allocations
            self._seconds[width], self._tokens[width] = seconds, float(n_tokens)
        elif trials == 1:
            self._seconds[width] = min(seconds, self._seconds[width])
            self._tokens[width] = (self._tokens[width] + n_tokens) / 2
        else:
            stale = self._passes - self._seen[width] >= _RECHECK  # the machine may have changed
            memory = 0.0 if stale else _MEMORY
            self._seconds[width] += (1 - memory) * (seconds - self._seconds[width])
            self._tokens[width] += (1 - _MEMORY) * (n_tokens - self._tokens[width])
        self._trials[width] = trials + 1
        self._seen[width] = self._passes

    def _walk(self) -> int:
        known = [i for i, width in enumerate(self.candidates) if self.rate(width) is not None]
        best = max(known, key=lambda i: self.rate(self.candidates[i]) or 0.0)
        neighbours = [i for i in (best + 1, best - 1) if 0 <= i < len(self.candidates)]
        for i in neighbours:
            if self.rate(self.candidates[i]) is None:
                return i
        if self._since >= _RECHECK:
            self._since = 0
            return min(neighbours, key=lambda i: self._seen[self.candidates[i]])
        return best


def make_chooser(window: int | str, exactness: str) -> FixedWidth | AdaptiveWidth:
    """What chooses the widths of a run.

    Args:
        window: the policy's window, "adaptive" or an integer.
        exactness: the policy's promise; only tokens that are bitwise the plain loop's allow the
            width to follow the rows' ends.
    """
    if window == "adaptive":
        return AdaptiveWidth()
    return FixedWidth(int(window)) if exactness == "bitwise" else ConstantWidth(int(window))
