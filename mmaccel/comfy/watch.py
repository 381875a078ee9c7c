"""What looks at a run after every pass: the interrupt first, then progress and a preview."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mmaccel.comfy.preview import draw_progress, put_side_by_side
from mmaccel.comfy.table import Host
from mmaccel.pipelines.text_to_image.outputs import Request, RequestOutput

_REPORT, _PREVIEW = 0.1, 0.5  # seconds between two at least
_SHARE = 4  # a preview waits this many times as long as the last one took


@dataclass
class Watch:
    """An `on_step` that changes nothing.

    Args:
        host: is asked for interrupts and told of progress.
        image_model: the model, to draw previews.
        total: tokens of all images that will be made under this watch.
        clock: seconds.
    """

    host: Host
    image_model: Any
    total: int
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._done = 0  # tokens of finished images
        self._requests: Sequence[Request] = ()
        self._finished: dict[int, RequestOutput] = {}
        self._reported = self._drawn = self.clock()
        self._wait = _PREVIEW
        self._can_draw = self._is_clean = True  # clean: nothing unfinished was shown

    def begin(self, requests: Sequence[Request]) -> None:
        """The next run, of requests whose tags are their indices."""
        self.host.check_interrupt()
        self._requests, self._finished = requests, {}

    def finish(self, served: RequestOutput) -> None:
        """An image is finished; at the end no preview is left that shows less."""
        self.host.check_interrupt()
        self._finished[served.request.tag] = served
        self._done += len(served.tokens)
        if len(self._finished) < len(self._requests):
            return
        last = [self._finished[k].image for k in sorted(self._finished)]
        image = None if self._is_clean else put_side_by_side(last)
        self.host.report(min(self._done, self.total), self.total, image)

    def __call__(self, progress: Any) -> None:
        """See `mmaccel.results.OnStep`. Whatever the host raises ends the run."""
        self.host.check_interrupt()
        now = self.clock()
        if now - self._reported < _REPORT:
            return
        image = None
        if self._can_draw and now - self._drawn >= self._wait:
            image = self._draw(progress)
            self._drawn = self.clock()
            self._wait = max(_PREVIEW, _SHARE * (self._drawn - now))
            self.host.check_interrupt()  # drawing may have taken a while
        made = zip(progress.rows, progress.lengths.tolist())
        done = self._done + sum(n for row, n in made if row not in self._finished)
        self.host.report(min(done, self.total), self.total, image)
        self._reported = self.clock()

    def _draw(self, progress: Any) -> Any:
        try:
            asked = [self._requests[row] for row in progress.rows]
            captions, seeds = [each.prompt for each in asked], [each.seed for each in asked]
            image = draw_progress(self.image_model, progress, captions, seeds)
        except torch.OutOfMemoryError:  # the run itself may have room: it goes on without
            self._can_draw = False
            return None
        self._is_clean = self._is_clean and image is None
        return image
