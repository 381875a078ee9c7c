"""What the encoder saw of an image, so that the visual tokens that stayed can be shown on it.

A processor's pixels without their normalisation, tile by tile; for models that read an image of any
size as one grid (Qwen2-VL and its successors) the image itself, scaled to that grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmaccel.pipelines.hosts.vision_language.kept import KeptTokens
from mmaccel.pipelines.image_to_text.image_tokens import ImageTokens

if TYPE_CHECKING:
    from PIL.Image import Image


def find_image_tokens(
    model: Any,
    processor: Any,
    kept: Sequence[KeptTokens],
    inputs: Mapping[str, Any],
    images: Sequence[Sequence[Image]],
) -> list[list[ImageTokens]]:
    """The tokens of each row's images, that a call of `generate` with these inputs kept."""
    flat = [image for images_of_row in images for image in images_of_row]
    by_row: list[list[ImageTokens]] = [[] for _ in images]
    for each in kept:
        places = each.places
        pixels = None
        if bool((places.row >= 0).any()):
            if "image_grid_thw" in inputs:
                patch = model.config.vision_config.patch_size
                _, height, width = inputs["image_grid_thw"][each.index].tolist()
                pixels = _scale(flat[each.index], (width * patch, height * patch))
            elif places.is_own:
                pixels = _read_tiles(processor, inputs["pixel_values"][each.index], places.tiles)
        by_row[each.row].append(
            ImageTokens(
                each.kept, places.group.cpu(), places.row.cpu(), places.column.cpu(), pixels,
                places.tile_grid,
            )
        )  # fmt: skip
    return by_row


def _read_tiles(processor: Any, values: Tensor, tiles: int) -> Tensor:
    """`[V, h, w, 3]` uint8 of a processor's `[3, h, w]`, or `[V or more, 3, h, w]`."""
    values = values.float().cpu()
    views = values[None] if values.ndim == 3 else values[:tiles]
    settings = processor.image_processor
    if getattr(settings, "do_normalize", True):
        mean = torch.tensor(settings.image_mean, dtype=torch.float32)
        std = torch.tensor(settings.image_std, dtype=torch.float32)
        views = views * std.view(1, -1, 1, 1) + mean.view(1, -1, 1, 1)
    if getattr(settings, "do_rescale", True):
        views = views / float(getattr(settings, "rescale_factor", 1 / 255))
    return views.round().clamp(0, 255).byte().permute(0, 2, 3, 1).contiguous()


def _scale(image: Image, size: tuple[int, int]) -> Tensor:
    """`[1, h, w, 3]` uint8 of an image, scaled to (width, height)."""
    import numpy as np
    from PIL import Image

    scaled = image.resize(size, Image.Resampling.BICUBIC)
    return torch.from_numpy(np.asarray(scaled).copy())[None]
