"""Finished rows of video tokens to clips."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mmaccel.errors import OptionError
from mmaccel.pipelines.video import Clip
from mmaccel.pipelines.video_model import VideoModel
from mmaccel.places import EndedRow


class RowRenderer:
    """Where finished rows become clips and are handed out.

    Args:
        video: the model.
        seeds: of the rows, in 0..2**64-1.
        n_given: frames of pixels that all clips begin with.
        deliver: called with every clip.

    Raises:
        OptionError: `deliver` cannot be called.

    Attributes:
        given: `[f, rows, columns]` int64, tokens of the frames given; to be set before the run.
        seconds: spent here.
        pixel_seconds: of these, what rendering took.
    """

    given: Tensor

    def __init__(
        self, video: VideoModel, seeds: Sequence[int], n_given: int,
        deliver: Callable[[Clip], None],
    ) -> None:  # fmt: skip
        if not callable(deliver):
            raise OptionError(f"deliver: expected a function, received {deliver!r}; give one")
        self._video, self._seeds, self._n_given, self._deliver = video, seeds, n_given, deliver
        self.seconds = self.pixel_seconds = 0.0

    def take(self, row: EndedRow) -> None:
        """Turn one row into frames, by itself, so that others do not enter it."""
        began, video, given = time.perf_counter(), self._video, self.given
        new = row.tokens.to(given.device).view(-1, *given[0].shape)
        whole = torch.cat((given, new))
        frames = video.render(whole)
        self.pixel_seconds += time.perf_counter() - began
        seed = self._seeds[row.row]
        self._deliver(Clip(
            row.row, seed, frames, self._n_given, len(given), video.fps, whole.cpu(), row.passes,
            row.total_variation,
        ))  # fmt: skip
        self.seconds += time.perf_counter() - began
