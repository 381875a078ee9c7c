"""Calls of `generate` that are parts of one work, such as the frames of an utterance."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from mmaccel.pipelines.hosts.vision_language.reduction import VisualReduction
from mmaccel.pipelines.hosts.vision_language.visual_call import VisualCall
from mmaccel.results import Stats


class CallSeries(threading.local):
    """What consecutive calls of the present thread have made.

    Args:
        reduction: of the visual tokens of its calls.

    Attributes:
        visuals: what reducers do in the call that runs.
        tokens: `[B, L]` int64, of the last call; None before the first.
        window: of the last call of a watched series; None of any other.
        n_calls: how many there were.
        parts: their statistics, of a watched series; None of any other.
    """

    def __init__(self, reduction: VisualReduction) -> None:
        self.visuals = VisualCall(reduction)
        self.reset()

    def reset(self) -> None:
        """The next call of this thread is the first one of a series."""
        self.tokens: Tensor | None = None
        self.window: Any = None
        self.n_calls = 0
        self.parts: list[Stats] | None = None

    @contextmanager
    def watch(self) -> Iterator[list[Stats]]:
        """Inside the block calls of this thread belong to a new series, whose statistics it has."""
        outer = dict(vars(self))
        self.reset()
        parts: list[Stats] = []
        self.parts = parts
        try:
            yield parts
        finally:
            vars(self).update(outer)
