"""Taking the time of passes, between a run and its step runner.

The watch starts when every record is made and a first replay is over, so that what it reads is the
time of passes as they go on for the rest of a run, the host's looks included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from mmaccel.contracts import TokenModel
from mmaccel.samplers.step_runner import GraphKey, StaticBuffers, StepRunner

Clock = Callable[[], float]


class Enough(Exception):
    """All passes that were wanted are timed."""


class Stopwatch:
    """A `StepRunner` that takes the time of the passes that are replayed.

    Args:
        runner: carries out the passes.
        n_passes: how many to time at most; the pass behind them raises `Enough`.
        clock: seconds, of a device that has finished its work.

    Attributes:
        seconds: of the passes timed, all together.
        timed: number of passes timed.
    """

    captures = 0
    has_cache = False  # what is timed serves no later run

    def __init__(self, runner: StepRunner, n_passes: int, clock: Clock) -> None:
        self.runner, self.n_passes, self.clock = runner, n_passes, clock
        self.is_static, self.sync_every = runner.is_static, runner.sync_every
        self.reason = runner.reason
        self.seconds, self.timed = 0.0, 0
        self._began: float | None = None

    @property
    def name(self) -> str:
        """What statistics call the runner inside."""
        return self.runner.name

    def load(self, key: GraphKey | None, inputs: dict[str, Tensor]) -> StaticBuffers | None:
        """See `StepRunner.load`."""
        self._began = None
        return self.runner.load(key, inputs)

    def reserve(self, model: TokenModel, rows: int, positions: int) -> None:
        """See `StepRunner.reserve`."""
        self.runner.reserve(model, rows, positions)

    def finish(self) -> None:
        """See `StepRunner.finish`."""
        self.runner.finish()

    def free_memory(self) -> bool:
        """See `StepRunner.free_memory`."""
        return self.runner.free_memory()

    def run_step(self, key: Hashable | None, step: Callable[[], None]) -> bool:
        """See `StepRunner.run_step`.

        Raises:
            Enough: as many passes as were wanted are timed.
        """
        if self.timed == self.n_passes:
            raise Enough
        is_usual = self.runner.run_step(key, step)
        self.reason = self.runner.reason
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
