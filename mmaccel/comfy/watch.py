"""What looks at a run after every pass: the interrupt first, then progress and a preview."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mmaccel.comfy.preview import draw_progress, put_side_by_side
from mmaccel.comfy.table import Host

_REPORT, _PREVIEW = 0.1, 0.5  # seconds between two at least
_SHARE = 4  # a preview waits this many times as long as the last one took


@dataclass
class Watch:
    """An `on_step` that changes nothing.

    Args:
        host: is asked for interrupts and told of progress.
        pictures: the model, to draw previews.
        total: tokens of all pictures that will be made under this watch.
        clock: seconds.
    """

    host: Host
    pictures: Any
    total: int
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._done = 0  # tokens of finished batches
        self._captions: Sequence[str] = ()
        self._seeds: Sequence[int] = ()
        self._reported = self._drawn = self.clock()
        self._wait = _PREVIEW
        self._can_draw = self._is_clean = True  # clean: nothing unfinished was shown

    def begin(self, captions: Sequence[str], seeds: Sequence[int]) -> None:
        """The next batch; an interrupt that came in between is heard here."""
        self.host.check_interrupt()
        self._captions, self._seeds = captions, seeds

    def finish(self, tokens: int, images: Sequence[Any]) -> None:
        """A batch is finished, with this many tokens; no preview outlives its pictures."""
        self._done += tokens
        picture = None if self._is_clean else put_side_by_side(images)
        self.host.report(min(self._done, self.total), self.total, picture)

    def __call__(self, progress: Any) -> None:
        """See `mmaccel.results.OnStep`. Whatever the host raises ends the run."""
        self.host.check_interrupt()
        now = self.clock()
        if now - self._reported < _REPORT:
            return
        picture = None
        if self._can_draw and now - self._drawn >= self._wait:
            picture = self._draw(progress)
            self._drawn = self.clock()
            self._wait = max(_PREVIEW, _SHARE * (self._drawn - now))
            self.host.check_interrupt()  # drawing may have taken a while
        done = self._done + int(progress.lengths.sum())
        self.host.report(min(done, self.total), self.total, picture)
        self._reported = self.clock()

    def _draw(self, progress: Any) -> Any:
        try:
            picture = draw_progress(self.pictures, progress, self._captions, self._seeds)
        except torch.OutOfMemoryError:  # the run itself may have room: it goes on without
            self._can_draw = False
            return None
        self._is_clean = self._is_clean and picture is None
        return picture
