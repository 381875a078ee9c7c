"""Preprocessing of the given frames of a clip: images of any size to a model's frames."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmaccel.checks import check_length
from mmaccel.errors import OptionError

if TYPE_CHECKING:
    from PIL.Image import Image


_ORIENTATION = 0x0112  # tag of EXIF; 1 is upright


def read_start(start: Any, size: tuple[int, int], starts: Sequence[int]) -> Tensor:
    """The last frames of `start`, as many as the model takes: `[F, 3, height, width]` in -1..1.

    Args:
        start: a PIL image, a list of them, or `[F, height, width, 3]`, uint8 or float in 0..1.
        size: width and height; frames are scaled to cover it, and cropped in the centre.
        starts: numbers of frames that the model accepts, smallest first.

    Raises:
        OptionError: no frames, images without pixels, or images of unknown brightness.
    """
    from PIL import Image

    if isinstance(start, Image.Image):
        images: list[Any] = [start]
    elif isinstance(start, Tensor):
        images = _images(start)
    else:
        if isinstance(start, Sequence):
            check_length("start", start)
        images = list(start) if isinstance(start, Sequence) else []
    if not images or not all(isinstance(image, Image.Image) for image in images):
        raise OptionError(
            "start: expected an image, a list of images or a tensor [frames, height, width, 3], "
            f"received {_describe(start)}; open it with PIL.Image.open"
        )
    n_frames = max((n for n in starts if n <= len(images)), default=0)
    if not n_frames:
        raise OptionError(
            f"start: expected at least {starts[0]} frames, received {len(images)}; give more"
        )
    fitted = [bytearray(_cover(image, size).tobytes()) for image in images[-n_frames:]]
    pixels = torch.stack([torch.frombuffer(each, dtype=torch.uint8) for each in fitted])
    frames = pixels.view(n_frames, size[1], size[0], 3).permute(0, 3, 1, 2)
    return frames.float().div(127.5).sub(1)


def _images(frames: Tensor) -> list[Image]:
    """Frames of a tensor as images with 8 bits a channel."""
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


def upright_rgb(image: Image, option: str = "start") -> Image:
    """An image as RGB, upright by EXIF, without transparency; 32-bit ones are refused."""
    from PIL import Image, ImageOps

    if image.getexif().get(_ORIENTATION, 1) != 1:  # else it would make a copy
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # Pillow would clip these at 255
        high = image.tobytes()[0 if image.mode == "I;16B" else 1 :: 2]  # of each number
        return Image.frombytes("L", image.size, high).convert("RGB")
    if image.mode in ("I", "F"):
        raise OptionError(
            f"{option}: expected 8 or 16 bits a channel, received an image of mode {image.mode!r}; "
            "scale it, and save it in 8 bits"
        )
    return image.convert("RGB")


def _cover(image: Image, size: tuple[int, int]) -> Image:
    """Scale an image to cover `size`, and crop its centre."""
    from PIL import Image

    if not image.width or not image.height:
        raise OptionError(
            f"start: expected images of pixels, received one of {image.width}x{image.height};"
            " give another"
        )
    image, (width, height) = upright_rgb(image), size
    scale = max(width / image.width, height / image.height)
    wide = math.ceil(scale * image.width)
    high = math.ceil(scale * image.height)
    left, top = round((wide - width) / 2), round((high - height) / 2)
    across = image.width / wide
    down = image.height / high
    box = (left * across, top * down, (left + width) * across, (top + height) * down)
    # Only the visible part is scaled: a scaled strip one pixel wide would fill the memory.
    return image.resize(size, Image.Resampling.BILINEAR, box)


def _describe(start: Any) -> str:
    if isinstance(start, Tensor):
        return f"a tensor {list(start.shape)} of {start.dtype}"
    return f"{type(start).__name__} {str(start)[:60]!r}"
