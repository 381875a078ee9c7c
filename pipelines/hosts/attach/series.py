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
    """What consecutive calls of the present thread have made."""

    def __init__(self, reduction: VisualReduction) -> None:
        self.visuals = VisualCall(reduction)
        self.reset()

    def reset(self) -> None:
        self.tokens: Tensor | None = None  # [B, L] int64, of the last call
        self.window: Any = None  # of the last call of a watched series
        self.n_calls = 0
        self.parts: list[Stats] | None = None  # of the calls of a watched series; None of any other

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
