"""The views of an image that LLaVA-NeXT's tower reads: the whole image at half size, then tiles.

`split_views` gives, for a batch on tensors, what the processor's image part gives one image at a
time (Liu et al., 2024, "LLaVA-NeXT: improved reasoning, OCR, and world knowledge").
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import avg_pool2d

from mmaccel.demo.scenes_vqa.layout import CANVAS, TILE

PATCH = 4
GRID = TILE // PATCH  # patches along a view
TILES = CANVAS // TILE  # tiles along an image
VIEWS = 1 + TILES * TILES
MEAN = STD = 0.5


def split_views(images: Tensor) -> Tensor:
    """Views of images.

    Args:
        images: [B, 3, 80, 80] uint8.

    Returns:
        [B, 5, 3, 40, 40] float32, normalised: the whole image, then the tiles row by row.
    """
    whole = images.float()
    for sides in ((1, TILES), (TILES, 1)):  # PIL rounds after each direction
        whole = (avg_pool2d(whole, sides) + 0.5).floor()
    tiles = images.float().unflatten(2, (TILES, TILE)).unflatten(4, (TILES, TILE))
    tiles = tiles.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    views = whole[:, None].new_empty(len(images), VIEWS, 3, TILE, TILE)
    views[:, 0], views[:, 1:] = whole, tiles
    return (views / 255 - MEAN) / STD
