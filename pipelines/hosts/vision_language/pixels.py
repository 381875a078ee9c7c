"""Images made smaller in front of the vision encoder, which then computes fewer patches.

The processor's pixels are averaged, to whole patches: of images, tiles or frames as rows, or of
patches in a packed sequence with a grid of its own. Every place of the full grid is a place of the
cell that it lies in, of which the one in its middle stands for the others.

Departures: see `mmaccel.reduction.visual_tokens.downsample_pixels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d, interpolate

from mmaccel.pipelines.hosts.vision_language.tower_run import Level, TowerRun
from mmaccel.reduction.visual_tokens.downsample_pixels import DownsamplePixels


def find_middles(full: Sequence[int], small: Sequence[int]) -> Tensor:
    """`[h * w]` int64: of each place of a grid h x w the place in the middle of its cell."""
    axes = []
    for n, m in zip(full, small, strict=True):
        cell = torch.arange(n) * m // n  # of each place along this side
        first, last = torch.searchsorted(cell, cell), torch.searchsorted(cell, cell, right=True)
        axes.append((first + last) // 2)
    return (axes[0][:, None] * full[1] + axes[1]).flatten()


def _average(pixels: Tensor, size: Sequence[int]) -> Tensor:
    return interpolate(pixels.float(), size=tuple(size), mode="area").to(pixels.dtype)


def shrink_rows(
    run: TowerRun, method: DownsamplePixels, pixels: Tensor, given: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """Rows of pixels `[R, C, H, W]`, made smaller."""
    full = [n // run.unit for n in run.grid]
    small = method.shrink(*full)
    target = find_middles(full, small).to(pixels.device)
    if not run.drop(-1, target.repeat(len(pixels), 1)):
        return pixels, given
    if run.known.interpolates:
        given = {**given, "interpolate_pos_encoding": True}
    mask = given.get("patch_attention_mask")
    if mask is not None:
        grid = [n * run.unit for n in small]
        given = {**given, "patch_attention_mask": adaptive_max_pool2d(mask.float(), grid).bool()}
    return _average(pixels, [n * run.unit * run.side for n in small]), given


def shrink_pack(
    run: TowerRun, method: DownsamplePixels, pixels: Tensor, given: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """Patches `[sum of t * h * w, C * F * P * P]` of images, made smaller, with their grids."""
    unit, side = run.unit, run.side
    grids = given["grid_thw"]
    patches, small_grids, targets = list[Tensor](), list[list[int]](), list[Tensor]()
    first = 0
    parts = pixels.split(grids.prod(1).tolist())
    for packed, (frames, height, width) in zip(parts, grids.tolist(), strict=True):
        full = height // unit, width // unit
        small = method.shrink(*full)
        for _ in range(frames):
            targets.append(first + find_middles(full, small))
            first += full[0] * full[1]
        small_grids.append([frames, small[0] * unit, small[1] * unit])
        if small != full:
            image = unpack_patches(packed, (frames, height, width), unit, side)
            packed = pack_patches(_average(image, [n * unit * side for n in small]), unit, side)
        patches.append(packed)
    run.target = torch.cat(targets).to(pixels.device)
    run.levels.append(Level(-1, run.target[None]))
    return torch.cat(patches), {**given, "grid_thw": grids.new_tensor(small_grids)}


def unpack_patches(patches: Tensor, grid: Sequence[int], unit: int, side: int) -> Tensor:
    """Frames `[t, C * F, H, W]` of a Qwen-VL processor's patches `[t * h * w, C * F * P * P]`, in
    blocks of `unit` x `unit` of `side` P.
    """
    t, h, w = grid
    x = patches.view(t, h // unit, w // unit, unit, unit, -1, side, side)
    return x.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(t, -1, h * side, w * side)


def pack_patches(frames: Tensor, unit: int, side: int) -> Tensor:
    """The inverse of `unpack_patches`."""
    t, c, height, width = frames.shape
    x = frames.view(t, c, height // (unit * side), unit, side, width // (unit * side), unit, side)
    return x.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, c * side * side)
