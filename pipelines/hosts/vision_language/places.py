"""Where the features of a prompt's images stand: which output of the tower each one is.

The places of a tower are what it gives out for all images, or all videos, of a call: of every tile
or frame the grid of its patches, or of features that it joins them to, one behind the other.
Features of a prompt are places, packed by the model's own `pack_image_features` (tiles side by
side, no padding, tokens at ends of rows), which packs the places' numbers here.

Source: `get_image_features` and `pack_image_features` of these models in transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from mmaccel.pipelines.hosts.vision_language.towers import describe_features


@dataclass(frozen=True)
class Places:
    """Where the n features of one image or video stand."""

    source: Tensor  # [n] int64, the place of each; -1 for tokens that end a row or a video
    group: Tensor  # [n] int64, tile or frame
    row: Tensor  # [n] int64, in its grid; -1 where unknown
    column: Tensor
    tiles: int  # rows of the tower for this image or video, its tiles or frames
    tile_grid: tuple[int, int]  # rows and columns of tiles; (0, 0) for an overview alone
    is_own: bool  # False: pooled or resized after the tower; `source` then counts the features
    total: int  # places of this image or video


def find_missing(model: Any, modality: str, inputs: Mapping[str, Any]) -> str | None:
    """The argument that says where features stand and is not given; None where none is missing."""
    layout = describe_features(model).layout
    argument = {
        ("grid", "image"): "image_grid_thw",
        ("grid", "video"): "video_grid_thw",
        ("tiles", "image"): "image_sizes",
        ("tiles", "video"): "pixel_values_videos",
    }.get((layout, modality))
    return None if argument is None or inputs.get(argument) is not None else argument


def find_places(
    model: Any,
    modality: str,
    counts: Sequence[int | None],
    inputs: Mapping[str, Any],
    device: torch.device | None = None,
) -> list[Places]:
    """Where the features of all images, or of all videos, of a call stand.

    Args:
        counts: features of each; None where the inputs alone say it.
        inputs: what `generate` was called with: `image_sizes`, `image_grid_thw`, …
    """
    all_places = list[Places]()
    first = 0
    for index, n in enumerate(counts):
        all_places.append(_find_places(model, modality, index, n, inputs, first, device))
        first += all_places[-1].total
    return all_places


def find_rows(
    model: Any, inputs: Mapping[str, Any], modality: str, n: int, owners: Sequence[int]
) -> list[int]:
    """The prompt's row of each of n rows of the tower, of those of each placeholder, `owners`."""
    counts: list[int | None] = [len(owners) // n] * n
    if modality == "video":
        videos = len(inputs["pixel_values_videos"])
        counts = [len(owners) // videos] * videos
    elif describe_features(model).layout == "tiles":
        counts = [None] * len(inputs["image_sizes"])
    rows = list[int]()
    first = 0
    for places in find_places(model, modality, counts, inputs):
        rows += [owners[first] if first < len(owners) else 0] * places.tiles
        first += len(places.source)
    return rows


def _find_places(
    model: Any,
    modality: str,
    index: int,
    n: int | None,
    inputs: Mapping[str, Any],
    first: int,
    device: torch.device | None,
) -> Places:
    """Those of one image or video, whose first place is number `first`."""
    known = describe_features(model)
    layout = known.layout
    if n is not None and find_missing(model, modality, inputs) is not None:
        layout = "blocks"
    if layout in ("grid", "blocks"):
        assert n is not None
        grid = (0, 0)
        if layout == "grid":
            unit = known.unit(model.config)
            _, height, width = inputs[f"{modality}_grid_thw"][index].tolist()
            grid = (height // unit, width // unit)
        return _lay(torch.arange(n, device=device), first, n, grid)
    vision = model.config.vision_config
    side = vision.image_size // vision.patch_size
    per_row = inputs.get("batch_num_images")
    is_tiled = layout == "tiles" and modality == "image"
    if per_row is not None and "frames" in known.looks:
        # LLaVA-OneVision cuts images that are alone in a row
        is_tiled &= [int(count) for count in per_row for _ in range(int(count))][index] == 1
    if is_tiled:
        packed, tile_grid = _pack(model, inputs["image_sizes"][index], side, device)
        tiles = 1 + tile_grid[0] * tile_grid[1]
        place = packed.round().long()
        if n in (None, len(place)) and torch.equal(place.double(), packed):
            return _lay(place, first, tiles * side**2, (side, side), tiles, tile_grid)
        # features that were resized after the tower: means of several tokens
        where = torch.arange(len(place) if n is None else n, device=device)
        return _lay(where, first, tiles * side**2, tiles=tiles, is_own=False)
    ends = int(layout == "tiles")  # a token ends the row of one tile, or the video
    n_tokens = side**2 if n is None else n - ends
    where = torch.arange(n_tokens + ends, device=device)
    where = where.where(where < n_tokens, -1)  # of the end
    if modality == "video":  # frames are pooled
        tiles = inputs["pixel_values_videos"].shape[1]
        pooled = isqrt(n_tokens // tiles)
        return _lay(where, first, tiles * side**2, (pooled, pooled), tiles, is_own=False)
    is_own = n_tokens == side**2
    return _lay(where, first, side**2, (side, side) if is_own else (0, 0), is_own=is_own)


def _lay(
    source: Tensor,
    first: int,
    total: int,
    grid: tuple[int, int] = (0, 0),
    tiles: int = 1,
    tile_grid: tuple[int, int] = (0, 0),
    is_own: bool = True,
) -> Places:
    """Places in grids h x w, one behind the other; (0, 0) where that is not known."""
    height, width = grid
    is_token = source >= 0
    group = torch.zeros_like(source)
    row = column = group - 1
    if width:  # source = (group * height + row) * width + column
        group = (source // (height * width)).where(is_token, 0)
        row = (source // width % height).where(is_token, -1)
        column = (source % width).where(is_token, -1)
    source = (source + first).where(is_token, -1)
    return Places(source, group, row, column, tiles, tile_grid, is_own, total)


def _pack(
    model: Any, size: Any, side: int, device: torch.device | None
) -> tuple[Tensor, tuple[int, int]]:
    """Numbers `[n]` float64 of an overview's tokens and of tiles, packed as features of an image of
    a size, -1 for tokens that end a row; and rows and columns of tiles.
    """
    from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape

    size = torch.as_tensor(size)
    rows, columns = get_anyres_image_grid_shape(
        size, model.config.image_grid_pinpoints, model.config.vision_config.image_size
    )
    tiles = 1 + rows * columns
    numbers = torch.arange(tiles * side**2, dtype=torch.float64, device=device)
    arguments: dict[str, Any] = {
        "image_features": [numbers.view(tiles, side**2, 1)],
        "image_sizes": size[None],
        "image_newline": numbers.new_full((1,), -1.0),
    }
    if "frames" not in describe_features(model).looks:  # LLaVA-NeXT
        arguments["vision_feature_select_strategy"] = "default"
    return model.base_model.pack_image_features(**arguments)[0][0][:, 0], (rows, columns)
