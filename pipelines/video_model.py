"""What `ImageToVideo` needs of a model that continues clips; one class for each family has it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from mmaccel.contracts import TokenModel
from mmaccel.samplers.filters import Filters
from mmaccel.tokenizers_vq.grid import Grid


class VideoModel(Protocol):
    """First frames to prompts, and tokens to frames.

    Attributes:
        window: predicts tokens, in raster order, frame after frame.
        layout: rows and columns of a frame of tokens.
        filters: temperature and truncation as the model's authors recommend.
        n_frames: of tokens in a clip.
        starts: numbers of frames of pixels that a clip may begin with, smallest first.
        size: width and height of frames, in pixels.
        fps: frames of pixels a second.
    """

    window: TokenModel
    layout: Grid
    filters: Filters
    n_frames: int
    starts: tuple[int, ...]
    size: tuple[int, int]
    fps: float

    def encode(self, frames: Tensor) -> Tensor:
        """First frames as tokens.

        Args:
            frames: `[F, 3, height, width]` float32 in -1..1, on the CPU; F of `starts`.

        Returns:
            `[f, rows, columns]` int64: whole frames of tokens that depend on these frames alone.

        Raises:
            UnsupportedModelError: a codec whose tokens are not the model's.
        """

    def render(self, tokens: Tensor) -> Tensor:
        """A clip's tokens as frames.

        Args:
            tokens: `[n_frames, rows, columns]` int64.

        Returns:
            `[F, height, width, 3]` uint8, on the CPU.
        """
