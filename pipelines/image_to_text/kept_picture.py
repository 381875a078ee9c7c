"""A picture of the visual tokens that stayed: kept patches as they are, dropped ones dimmed.

An image that is read in tiles has its overview on the left and its tiles on the right, as they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.image_to_text.image_tokens import ImageTokens

if TYPE_CHECKING:
    from PIL.Image import Image

_SIDE = 480  # pixels of a view's longer side, and of all tiles together
_GAP = 16
_MARGIN = 24
_PAPER = 250
_VEILED = 0.75  # of a dropped patch, in grey
_DARK, _LIGHT, _MIDDLE = 16.0, 235.0, 100.0  # veils of light and of dark images, and what is dark
_ABSENT = 0
_DROPPED = 1
_KEPT = 2


def draw_kept(images: Sequence[ImageTokens]) -> Image:
    """The tokens of images whose places are known, one image below the other."""
    from PIL import Image

    rows = [_draw_row(image) for image in images if image.pixels is not None]
    if not rows:
        raise UnsupportedModelError(
            "kept tokens: expected visual tokens whose places in the image are known, received "
            f"those of {len(images)} images without; LLaVA, LLaVA-NeXT, LLaVA-OneVision and "
            "Qwen2-VL to Qwen3-VL have them"
        )
    width = max(row.shape[1] for row in rows) + 2 * _MARGIN
    height = sum(row.shape[0] for row in rows) + _GAP * (len(rows) - 1) + 2 * _MARGIN
    sheet = torch.full((height, width, 3), _PAPER, dtype=torch.uint8)
    top = _MARGIN
    for row in rows:
        sheet[top : top + row.shape[0], _MARGIN : _MARGIN + row.shape[1]] = row
        top += row.shape[0] + _GAP
    return Image.fromarray(sheet.numpy())


def _draw_row(image: ImageTokens) -> Tensor:
    """One image's views, `[h, w, 3]` uint8: the first on the left, the tiles on the right."""
    assert image.pixels is not None
    rows = int(image.row.max()) + 1
    columns = int(image.column.max()) + 1
    states = torch.full((len(image.pixels), rows, columns), _ABSENT, dtype=torch.int64)
    is_place = (image.row >= 0) & (image.column >= 0)
    at = tuple(values[is_place] for values in (image.view, image.row, image.column))
    states[at] = torch.where(image.kept[is_place], _KEPT, _DROPPED)
    veil = _LIGHT if float(image.pixels[0].float().mean()) < _MIDDLE else _DARK
    views = list(zip(image.pixels, states, strict=True))
    down, across = image.tile_grid
    if len(views) == 1 or down * across != len(views) - 1:
        cell = max(1, _SIDE // max(rows, columns))
        return _beside([_draw_view(*view, cell, veil) for view in views])
    cell = max(1, _SIDE // max(rows * down, columns * across))
    tiles = [_draw_view(*view, cell, veil) for view in views[1:]]
    lines = [torch.cat(tiles[k : k + across], 1) for k in range(0, len(tiles), across)]
    whole = _draw_view(*views[0], max(1, _SIDE // max(rows, columns)), veil)
    return _beside([whole, torch.cat(lines)])


def _draw_view(pixels: Tensor, states: Tensor, cell: int, veil: float) -> Tensor:
    """A view `[h, w, 3]` uint8, of pixels `[h', w', 3]`, with `cell` pixels a side of each token.

    `states` `[rows, columns]` are absent, dropped or kept; dropped ones tend to brightness `veil`.
    """
    size = (states.shape[0] * cell, states.shape[1] * cell)
    planes = pixels.permute(2, 0, 1)[None].float()
    is_larger = size[0] > planes.shape[2]
    scaled = (
        interpolate(planes, size, mode="nearest-exact")
        if is_larger
        else interpolate(planes, size, mode="bilinear", antialias=True)
    )[0]
    state = states.repeat_interleave(cell, 0).repeat_interleave(cell, 1)
    grey = scaled.mean(0, keepdim=True).expand_as(scaled)
    drawn = scaled.where(state == _KEPT, (1 - _VEILED) * grey + _VEILED * veil)
    drawn = drawn.where(state != _ABSENT, torch.tensor(float(_PAPER), dtype=torch.float32))
    return drawn.round().clamp(0, 255).byte().permute(1, 2, 0)


def _beside(views: Sequence[Tensor]) -> Tensor:
    """Views `[h, w, 3]` next to each other."""
    height = max(view.shape[0] for view in views)
    gap = torch.full((height, _GAP, 3), _PAPER, dtype=torch.uint8)
    parts: list[Tensor] = []
    for view in views:
        padded = torch.full((height, view.shape[1], 3), _PAPER, dtype=torch.uint8)
        padded[: view.shape[0]] = view
        parts += [padded, gap]
    return torch.cat(parts[:-1], 1)
