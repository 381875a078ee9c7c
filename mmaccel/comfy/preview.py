"""An image of what is decoded so far: what is missing is grey."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

    from mmaccel.pipelines.text_to_image.model import ImageModel

_MOST = 4  # images side by side
_GREY = (128, 128, 128)


def draw_progress(
    model: ImageModel, progress: Any, captions: Sequence[str], seeds: Sequence[int]
) -> Image | None:
    """Draw the first images of a running batch, side by side.

    Args:
        model: the model; it is only asked to render.
        progress: what `on_step` gets, of either kind. Nothing of it is changed.
        captions: of its places.
        seeds: of its places.

    Returns:
        None while there is nothing to show, and for models whose tokens lie in no rows.
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
    names, numbers = [captions[k] for k in shown], [seeds[k] for k in shown]
    images = model.render(tokens.flatten(1), names, numbers)
    return put_side_by_side([_grey_out(image, mask) for image, mask in zip(images, known.cpu())])


def known_cells(progress: Any, rows: int, columns: int) -> Tensor:
    """Which cells hold a final token, `[B, h, w]` bool; of a window, only whole rows."""
    length = rows * columns
    if hasattr(progress, "is_committed"):
        committed: Tensor = progress.is_committed[:, :length].reshape(-1, rows, columns)
        return committed
    made = progress.lengths[:, None] // columns > torch.arange(rows, device=progress.lengths.device)
    return made[..., None].expand(-1, -1, columns)


def fill_unknown(tokens: Tensor, known: Tensor) -> Tensor:
    """A copy of `tokens` `[B, h, w]` in which each unknown cell repeats a known one.

    The nearest above it in its column is taken, so that structural columns stay what they are;
    where there is none, the first known cell of the image. Every image has one.
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
