"""Progress of a run: after every pass interrupts are checked, then progress and a preview shown."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mmaccel.comfy import host

if TYPE_CHECKING:
    from PIL.Image import Image

    from mmaccel.pipelines.text_to_image.model import ImageModel

_REPORT, _PREVIEW = 0.1, 0.5  # seconds between two reports, and between two previews, at least
_SHARE = 4  # a preview waits this many times as long as the last one took to draw
_MOST = 4  # images side by side
_GREY = 128

Draw = Callable[[Any, Sequence[int]], "Image | None"]
"""A preview of what `on_step` gets, whose rows have these indices."""


class Progress:
    """`on_step`, `on_token` and `deliver` of a pipeline; changes nothing. What ComfyUI raises where
    the user interrupts ends the run. A `length` of 0 is what the passes say.
    """

    def __init__(self, rows: int, length: int = 0, draw: Draw | None = None) -> None:
        host.check_interrupt()
        self.rows, self.length, self.draw = rows, length, draw
        self.running: Sequence[int] = ()
        self.finished: set[int] = set()
        self.tokens = 0
        self.reported = self.drawn = time.monotonic()
        self.wait = _PREVIEW

    def __call__(self, progress: Any) -> None:
        host.check_interrupt()
        if progress.rows:
            self.running = progress.rows
        elif progress.passes == 1:  # of the next batch
            self.finished.update(self.running)
            first = len(self.finished)
            self.running = range(first, first + len(progress.lengths))
        self.length = self.length or progress.tokens.shape[1]
        if time.monotonic() - self.reported >= _REPORT:
            lengths = zip(self.running, progress.lengths.tolist())
            self.tokens = sum(n for row, n in lengths if row not in self.finished)
            self._report(self._preview(progress))

    def count(self, n_rows: int) -> None:
        """So many answers have a token more."""
        host.check_interrupt()
        self.tokens += n_rows
        self._report()

    def deliver(self, payload: Any) -> None:
        """An utterance or a clip is finished."""
        host.check_interrupt()
        self.finished.add(payload.index)

    def end(self, images: Sequence[Image] = ()) -> None:
        """All rows are there; finished `images` take the place of a preview."""
        total = self.rows * max(1, self.length)
        host.report(total, total, put_side_by_side(images) if images else None)

    def _report(self, image: Image | None = None) -> None:
        total = self.rows * self.length
        done = len(self.finished) * self.length + self.tokens
        host.report(min(done, total - 1), total, image)
        self.reported = time.monotonic()

    def _preview(self, progress: Any) -> Image | None:
        began = time.monotonic()
        if self.draw is None or began - self.drawn < self.wait:
            return None
        try:
            image = self.draw(progress, self.running)
        except torch.OutOfMemoryError:  # the run itself may have enough: it goes on without
            self.draw = image = None
        self.drawn = time.monotonic()
        self.wait = max(_PREVIEW, _SHARE * (self.drawn - began))
        host.check_interrupt()  # drawing may have taken a while
        return image


def draw_progress(
    model: ImageModel, progress: Any, prompts: Sequence[str], seeds: Sequence[int]
) -> Image | None:
    """Draw the first images of a running batch, of a window or a canvas, side by side; what is not
    decoded yet is grey. None while there is nothing to show, and for models whose tokens are not a
    plain grid.
    """
    from PIL import Image

    grid = model.layout
    if grid.rows < 2 or grid.frame != grid.rows * grid.columns:
        return None
    known = known_cells(progress, grid.rows, grid.columns)  # [B, h, w]
    shown = known.flatten(1).any(1).nonzero().flatten().tolist()[:_MOST]
    if not shown:
        return None
    known = known[shown]
    tokens = fill_unknown(progress.tokens[shown, : grid.frame].reshape(known.shape), known)
    images = model.render(tokens.flatten(1), [prompts[k] for k in shown], [seeds[k] for k in shown])
    greyed = []
    for image, cells in zip(images, known.cpu().numpy()):
        mask = np.asarray(Image.fromarray(cells).resize(image.size, Image.Resampling.NEAREST))
        greyed.append(np.where(mask[..., None], np.asarray(image), np.uint8(_GREY)))
    return put_side_by_side(greyed)


def known_cells(progress: Any, rows: int, columns: int) -> Tensor:
    """Which cells `[B, h, w]` hold a final token; of a window, only whole rows of the grid."""
    if hasattr(progress, "is_committed"):
        committed: Tensor = progress.is_committed[:, : rows * columns]
        return committed.reshape(-1, rows, columns)
    lengths = progress.lengths[:, None] // columns
    filled = lengths > torch.arange(rows, device=lengths.device)
    return filled[..., None].expand(-1, -1, columns)


def fill_unknown(tokens: Tensor, known: Tensor) -> Tensor:
    """A copy of `tokens` `[B, h, w]` in which each unknown cell repeats the nearest known one above
    it in its column, else the first known cell of the image; every image has one.
    """
    rows = torch.arange(known.shape[1], device=known.device)[None, :, None]
    last = torch.where(known, rows, -1).cummax(1).values  # [B, h, w], -1: none above
    above = tokens.gather(1, last.clamp(min=0))
    first = known.flatten(1).int().argmax(1)[:, None]
    spare = tokens.flatten(1).gather(1, first)[..., None]  # [B, 1, 1]
    return torch.where(last >= 0, above, spare)


def put_side_by_side(images: Sequence[Any]) -> Image:
    """The first images, all of one size, in a row."""
    from PIL import Image

    return Image.fromarray(np.concatenate([np.asarray(each) for each in images[:_MOST]], 1))
