"""StepPace: how wide the next step is, and what the last ones took."""

from __future__ import annotations

import time

from mmaccel.samplers.window.window_size import AdaptiveWidth, FixedWidth


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

    def end(self, n_passes: int, n_tokens: int, *, is_usual: bool) -> None:
        """End a step.

        Args:
            n_passes: passes since the last synchronisation.
            n_tokens: of all rows so far.
            is_usual: whether they took as long as others like them will.
        """
        if not is_usual:
            return
        seconds = (time.perf_counter() - self._began) / n_passes
        gained = (n_tokens - self._n_tokens) / n_passes
        self.chooser.observe(gained, self._n_open, seconds)

    def go_on(self, n_open: int, n_tokens: int) -> None:
        """Go on with this number of open rows, which have so many tokens."""
        self._n_open = n_open
        self._n_tokens = n_tokens
