"""Progress of a run: after every pass interrupts are checked, then progress and a preview shown."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmaccel.comfy.table import Host
from mmaccel.pipelines.media import RunProgress
from mmaccel.pipelines.text_to_image.outputs import Request, RequestOutput

if TYPE_CHECKING:
    from PIL.Image import Image

    from mmaccel.pipelines.text_to_image.model import ImageModel

_REPORT, _PREVIEW = 0.1, 0.5  # seconds between two reports, and between two previews, at least
_SHARE = 4  # a preview waits this many times as long as the last one took to draw
_MOST = 4  # images side by side
_GREY = (128, 128, 128)


class MediaProgress:
    """An `on_step` of speech and video: checks for interrupts, reports progress, changes nothing.

    Args:
        host: what it raises ends the run.
        rows: utterances or clips of the run.
    """

    def __init__(self, host: Host, rows: int) -> None:
        self._host = host
        self._run = RunProgress(rows)
        self._reported = time.monotonic()
        self._last = -1

    def finish(self, index: int) -> None:
        """An utterance or clip is finished."""
        self._host.check_interrupt()
        self._run.finish(index)
        self._report()

    def __call__(self, progress: Any) -> None:
        self._host.check_interrupt()
        self._run.update(progress)
        if time.monotonic() - self._reported >= _REPORT:
            self._report()
            self._reported = time.monotonic()

    def _report(self) -> None:
        """Report, unless nothing has changed since the last report."""
        if self._run.tokens != self._last:
            self._last = self._run.tokens
            self._host.report(self._last, self._run.total, None)


class AnswerProgress:
    """An `on_token` of answers, which have no more than `total` tokens together.

    Args:
        host: what it raises ends the run.
        total: of all answers, if none ends early.
    """

    def __init__(self, host: Host, total: int) -> None:
        self._host = host
        self._total = total
        self._done = 0

    def __call__(self, n_rows: int) -> None:
        """So many rows have a token more; the last report is left to `finish`."""
        self._host.check_interrupt()
        self._done += n_rows
        self._host.report(min(self._done, self._total - 1), self._total, None)

    def finish(self) -> None:
        """All answers are there."""
        self._host.report(self._total, self._total, None)


@dataclass
class ImageProgress:
    """An `on_step` of images: checks for interrupts, shows progress and previews, changes nothing.

    Args:
        host: what it raises ends the run.
        image_model: draws previews.
        total: tokens of all images of all runs.
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
        self._can_draw = True
        self._is_clean = True  # nothing unfinished was shown

    def begin(self, requests: Sequence[Request]) -> None:
        """Begin a run of requests whose tags are their indices."""
        self.host.check_interrupt()
        self._requests = requests
        self._finished = {}

    def finish(self, output: RequestOutput) -> None:
        """An image is finished. The last one replaces the preview by the finished images."""
        self.host.check_interrupt()
        self._finished[output.request.tag] = output
        self._done += len(output.tokens)
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
        lengths = zip(progress.rows, progress.lengths.tolist())
        done = self._done + sum(n for row, n in lengths if row not in self._finished)
        self.host.report(min(done, self.total), self.total, image)
        self._reported = self.clock()

    def _draw(self, progress: Any) -> Any:
        try:
            requests = [self._requests[row] for row in progress.rows]
            image = draw_progress(self.image_model, progress, requests)
        except torch.OutOfMemoryError:  # the run itself may have enough: it goes on without
            self._can_draw = False
            return None
        self._is_clean = self._is_clean and image is None
        return image


def draw_progress(model: ImageModel, progress: Any, requests: Sequence[Request]) -> Image | None:
    """Draw the first images of a running batch side by side; what is not decoded yet is grey.

    Args:
        model: renders tokens.
        progress: what `on_step` gets, of a window or a canvas.
        requests: the request of each row of `progress`.

    Returns:
        None while there is nothing to show, and for models whose tokens are not a plain grid.
    """
    grid = model.layout
    rows, columns = grid.rows, grid.columns
    if rows < 2 or grid.frame != rows * columns:
        return None
    known = known_cells(progress, rows, columns)  # [B, h, w]
    shown = [k for k, some in enumerate(known.flatten(1).any(1).tolist()) if some][:_MOST]
    if not shown:
        return None
    known = known[shown]
    tokens = fill_unknown(progress.tokens[shown, : grid.frame].reshape(known.shape), known)
    prompts = [requests[k].prompt for k in shown]
    seeds = [requests[k].seed for k in shown]
    images = model.render(tokens.flatten(1), prompts, seeds)
    return put_side_by_side([_grey_out(image, mask) for image, mask in zip(images, known.cpu())])


def known_cells(progress: Any, rows: int, columns: int) -> Tensor:
    """Which cells `[B, h, w]` hold a final token; of a window, only whole rows of the grid."""
    length = rows * columns
    if hasattr(progress, "is_committed"):
        committed: Tensor = progress.is_committed[:, :length].reshape(-1, rows, columns)
        return committed
    filled = progress.lengths[:, None] // columns > torch.arange(
        rows, device=progress.lengths.device
    )
    return filled[..., None].expand(-1, -1, columns)


def fill_unknown(tokens: Tensor, known: Tensor) -> Tensor:
    """A copy of `tokens` `[B, h, w]` in which each unknown cell repeats a known one.

    The nearest known cell above it in its column is taken, so that structural columns stay what
    they are. Where there is none, the first known cell of the image is taken. Every image has one.
    """
    rows = torch.arange(known.shape[1], device=known.device)[None, :, None]
    last = torch.where(known, rows, -1).cummax(1).values  # [B, h, w], -1: none above
    above = tokens.gather(1, last.clamp(min=0))
    first = known.flatten(1).int().argmax(1)[:, None]
    spare = tokens.flatten(1).gather(1, first)[..., None]  # [B, 1, 1]
    return torch.where(last >= 0, above, spare)


def _grey_out(image: Image, known: Tensor) -> Image:
    from PIL import Image

    mask = Image.fromarray(known.to(torch.uint8).mul(255).numpy(), mode="L")
    mask = mask.resize(image.size, Image.Resampling.NEAREST)
    return Image.composite(image, Image.new("RGB", image.size, _GREY), mask)


def put_side_by_side(images: Sequence[Image]) -> Image:
    """The first images in a row; all have the size of the first."""
    from PIL import Image

    images = images[:_MOST]
    width, height = images[0].size
    strip = Image.new("RGB", (width * len(images), height))
    for k, image in enumerate(images):
        strip.paste(image, (k * width, 0))
    return strip
