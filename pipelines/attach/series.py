"""Calls of `generate` that are parts of one work, such as the frames of an utterance."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from mmaccel.results import Stats

_STEP = 0x9E3779B97F4A7C15  # odd: the seeds of 2**63 calls differ


class CallSeries:
    """What consecutive calls of one thread have made.

    Args:
        repeats: whether calls are parts of one work, each of which has noise of its own.

    Attributes:
        is_watched: whether its statistics are added up at its end.
        tokens: `[B, L]` int64, of the last call; None before the first.
        n_calls: how many there were.
        parts: their statistics, of a watched series.
    """

    def __init__(self, repeats: bool, is_watched: bool = False) -> None:
        self.is_watched = is_watched
        self.tokens: Tensor | None = None
        self.n_calls = 0
        self.parts: list[Stats] = []
        self._repeats = repeats

    def add(self, stats: Stats) -> None:
        """Count a call."""
        self.n_calls += 1
        if self.is_watched:
            self.parts.append(stats)

    def vary(self, seed: int | Sequence[int] | None) -> int | Sequence[int] | None:
        """The seed of the next call."""
        if seed is None or not self._repeats:
            return seed
        shift = self.n_calls * _STEP
        if isinstance(seed, int):
            return (seed + shift) % 2**63
        return [(one + shift) % 2**63 for one in seed]


class SeriesOfThreads(threading.local):
    """The present series of each thread.

    Args:
        repeats: see `CallSeries`.
    """

    def __init__(self, repeats: bool) -> None:
        self._repeats = repeats
        self.present = CallSeries(repeats)

    @contextmanager
    def watch(self) -> Iterator[CallSeries]:
        """Inside the block calls of this thread belong to a new series."""
        outer = self.present
        self.present = CallSeries(self._repeats, is_watched=True)
        try:
            yield self.present
        finally:
            self.present = outer

    def reset(self) -> None:
        """The next call of this thread is the first one of a series."""
        self.present = CallSeries(self._repeats)
