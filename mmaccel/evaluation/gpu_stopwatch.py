"""Taking the time of passes from between a run and its `Steps`.

The watch starts when every record is made and a first replay is over, so that what it reads is the
time of passes as they go on for the rest of a run, the host's looks included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

import torch

from mmaccel.samplers.kept_runs import Shelf
from mmaccel.samplers.steps import Steps

Clock = Callable[[], float]


class Enough(Exception):
    """All passes that were wanted are timed."""


class Stopwatch:
    """`Steps` that takes the time of the passes that are replayed.

    Args:
        steps: carries out the passes.
        n_passes: how many to time at most; the pass behind them raises `Enough`.
        clock: seconds, of a device that has finished its work.

    Attributes:
        seconds: of the passes timed, all together.
        timed: number of passes timed.
    """

    captures = 0
    mark: object = None
    shelf: Shelf | None = None  # what is timed is not kept

    def __init__(self, steps: Steps, n_passes: int, clock: Clock) -> None:
        self.steps, self.n_passes, self.clock = steps, n_passes, clock
        self.is_static, self.sync_every = steps.is_static, steps.sync_every
        self.reason = steps.reason
        self.seconds, self.timed = 0.0, 0
        self._began: float | None = None

    @property
    def name(self) -> str:
        """What statistics call the steps inside."""
        return self.steps.name

    def begin(self) -> None:
        """A new run."""
        self.steps.begin()
        self._began = None

    def play(self, key: Hashable | None, step: Callable[[], None]) -> bool:
        """See `Steps.play`.

        Raises:
            Enough: as many passes as were wanted are timed.
        """
        if self.timed == self.n_passes:
            raise Enough
        is_usual = self.steps.play(key, step)
        self.reason = self.steps.reason
        if self._began is not None:
            self.timed += 1
        elif is_usual:  # the first of its kind is not timed
            self._began = self.clock()
        return is_usual

    def stop(self) -> None:
        """Behind the last pass, whether the run came to its end or not."""
        if self._began is not None:
            self.seconds = self.clock() - self._began


def device_clock(device: torch.device) -> Clock:
    """Seconds once the device has done all it was given."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now
