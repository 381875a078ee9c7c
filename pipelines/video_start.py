"""The frames a clip begins with: pictures of any size to those a model takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmaccel.errors import OptionError

if TYPE_CHECKING:
    from PIL.Image import Image


def read_start(start: Any, size: tuple[int, int], starts: Sequence[int]) -> Tensor:
    """The last frames of `start`, as many as a model takes.

    Args:
        start: a PIL picture, a list of them, or `[F, height, width, 3]`, uint8 or float in 0..1.
        size: width and height that are wanted; frames are made smaller or larger until they cover
            it, and what stands out is cut off on both sides.
        starts: numbers of frames a clip may begin with, smallest first; the largest that is there.

    Returns:
        `[F, 3, height, width]` float32 in -1..1.

    Raises:
        OptionError: no frames.
    """
    from PIL import Image

    if isinstance(start, Image.Image):
        pictures: list[Any] = [start]
    elif isinstance(start, Tensor):
        pictures = _pictures(start)
    else:
        pictures = list(start) if isinstance(start, Sequence) else []
    if not pictures or not all(isinstance(picture, Image.Image) for picture in pictures):
        raise OptionError(
            "start: expected a picture, a list of pictures or a tensor [frames, height, width, 3], "
            f"received {_describe(start)}; open it with PIL.Image.open"
        )
    n_frames = max((n for n in starts if n <= len(pictures)), default=0)
    if not n_frames:
        raise OptionError(
            f"start: expected at least {starts[0]} frames, received {len(pictures)}; give more"
        )
    fitted = [bytearray(_cover(picture, size).tobytes()) for picture in pictures[-n_frames:]]
    pixels = torch.stack([torch.frombuffer(each, dtype=torch.uint8) for each in fitted])
    frames = pixels.view(n_frames, size[1], size[0], 3).permute(0, 3, 1, 2)
    return frames.float().div(127.5).sub(1)


def _pictures(frames: Tensor) -> list[Image]:
    """Frames of a tensor, 8 bits a channel."""
    from PIL import Image

    is_video = frames.ndim == 4 and frames.shape[-1] == 3 and min(frames.shape) > 0
    if not is_video or not (frames.is_floating_point() or frames.dtype == torch.uint8):
        return []
    if frames.is_floating_point():
        if not bool(((frames >= 0) & (frames <= 1)).all()):
            raise OptionError(
                f"start: expected floats in 0..1, received {float(frames.min()):g}.."
                f"{float(frames.max()):g}; scale them"
            )
        frames = frames.mul(255).round().to(torch.uint8)
    return [Image.fromarray(frame) for frame in frames.cpu().numpy()]


def _cover(picture: Image, size: tuple[int, int]) -> Image:
    """A picture that fills `size`, cut in the middle of what is too long."""
    from PIL import Image

    width, height = size
    scale = max(width / picture.width, height / picture.height)
    wide, high = math.ceil(scale * picture.width), math.ceil(scale * picture.height)
    picture = picture.convert("RGB").resize((wide, high), Image.Resampling.BILINEAR)
    left, top = round((wide - width) / 2), round((high - height) / 2)
    return picture.crop((left, top, left + width, top + height))


def _describe(start: Any) -> str:
    if isinstance(start, Tensor):
        return f"a tensor {list(start.shape)} of {start.dtype}"
    return f"{type(start).__name__} {str(start)[:60]!r}"
