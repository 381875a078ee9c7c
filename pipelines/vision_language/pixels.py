"""Images made smaller in front of the vision encoder, which then computes fewer patches.

While `generate` encodes its images, a hook in front of the tower averages the pixels that the
processor made, to whole patches: of images, tiles or frames as rows (CLIP, SigLIP and Janus with
their own `interpolate_pos_encoding`, InternVL, Idefics3, whose positions are fractions of the
image), or of patches in a packed sequence with a grid of its own (Qwen-VL). A second hook, behind
the tower or behind the projector that joins patches, gives every place of the full grid the feature
of the cell that it lies in. So `pack_image_features` and the prompt's placeholders are as they
were, and `mmaccel.pipelines.vision_language.reduction` drops the columns of all but one place of
each cell, the one in its middle, from the prompt.

Departures: see `mmaccel.reduction.visual_tokens.downsample_pixels`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d, interpolate

from mmaccel.pipelines.vision_language.tokens import has_class_token
from mmaccel.pipelines.vision_language.tower_reduction import (
    TowerReduction,
    find_slots,
    join_targets,
    spread_features,
    spread_states,
)
from mmaccel.pipelines.vision_language.towers import JOINTS, describe_tower, find_side
from mmaccel.pipelines.vision_language.visuals import Visual
from mmaccel.reduction.visual_tokens.downsample_pixels import DownsamplePixels


def find_middles(full: Sequence[int], small: Sequence[int]) -> Tensor:
    """Of each place of a grid h x w the place in the middle of its cell, of h' x w' cells.

    Returns:
        `[h * w]` int64.
    """
    axes = []
    for n, m in zip(full, small, strict=True):
        cell = torch.arange(n) * m // n
        first, last = torch.searchsorted(cell, cell), torch.searchsorted(cell, cell, right=True)
        axes.append((first + last) // 2)
    return (axes[0][:, None] * full[1] + axes[1]).flatten()


class PixelReduction(TowerReduction):
    """The encoding of one `generate` call on smaller images."""

    remedy = "use Downsample"

    def __init__(
        self, model: Any, method: DownsamplePixels, inputs: Mapping[str, Any], seeds: Sequence[int]
    ) -> None:
        super().__init__(model, method, inputs, seeds)
        self._kind = model.config.model_type
        self._target: Tensor | None = None  # of each row of the tower
        self._slots: Tensor | None = None  # of the call of the tower

    def hook(self) -> Sequence[Any]:
        behind = self._tower
        if self._kind in JOINTS:
            behind = getattr(self._model.base_model, JOINTS[self._kind].part)
        before = self._shrink_packed if self._is_packed else self._shrink
        return [
            self._tower.register_forward_pre_hook(before, with_kwargs=True),
            behind.register_forward_hook(self._restore),
        ]

    def target(self, visual: Visual, visuals: Sequence[Visual]) -> Tensor | None:
        if not self._is_packed:
            return self._target
        grid = self._inputs[f"{visual.modality}_grid_thw"][visual.index].tolist()
        return find_middles(*self._grids_of(grid))

    def _shrink(self, _tower: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Rows of pixels `[R, C, H, W]`, made smaller."""
        self._slots = None
        if self._is_paused:
            return None
        given = dict(given)
        pixels = given.pop("pixel_values") if "pixel_values" in given else args[0]
        self.ran = True
        patch = find_side(self._tower)
        unit = self._unit
        full = tuple(n // (patch * unit) for n in pixels.shape[-2:])
        small = self.method.shrink(*full)
        self._target = find_middles(full, small)
        if small == full:
            return None
        self.changed = True
        self._slots = find_slots(self._target).to(pixels.device)
        size = tuple(n * patch * unit for n in small)
        given["pixel_values"] = interpolate(pixels.float(), size=size, mode="area").to(pixels.dtype)
        known = describe_tower(self._model)
        assert known is not None  # see VisionModel
        if known.interpolates:
            given["interpolate_pos_encoding"] = True
        mask = given.get("patch_attention_mask")
        if mask is not None:
            grid = tuple(n * unit for n in small)
            given["patch_attention_mask"] = adaptive_max_pool2d(mask.float(), grid).bool()
        return (), given

    def _restore(self, _module: Any, _args: Any, output: Any) -> Any:
        slots = self._slots
        if slots is None:
            return None
        if self._is_packed:
            return spread_features(output, slots)
        if isinstance(output, Tensor):  # of a projector
            return output[:, slots.to(output.device)]
        special = int(has_class_token(self._model))
        index = torch.cat([torch.arange(special, device=slots.device), slots + special])
        return spread_states(output, 0, lambda states, layer: states[:, index.to(states.device)])

    def _grids_of(self, grid: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """The grid of features of an image `(t, h, w)` in patches, and the smaller one."""
        full = grid[1] // self._unit, grid[2] // self._unit
        return full, self.method.shrink(*full)

    def _shrink_packed(self, _tower: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Patches `[sum of t * h * w, C * F * P * P]` of images, made smaller, with their grids."""
        self._slots = None
        if self._is_paused:
            return None
        self.ran = True
        given = dict(given)
        pixels = args[0]
        full_grids = given["grid_thw"]
        vision = self._model.config.vision_config
        unit = self._unit
        patches = list[Tensor]()
        grids = list[list[int]]()
        targets = list[Tensor]()
        parts = pixels.split(full_grids.prod(1).tolist())
        for own, grid in zip(parts, full_grids.tolist(), strict=True):
            full, small = self._grids_of(grid)
            targets += [find_middles(full, small)] * grid[0]
            grids.append([grid[0], small[0] * unit, small[1] * unit])
            made = own
            if small != full:
                image = unpack_patches(own, grid, unit, vision.patch_size)
                self.changed = True
                size = tuple(n * unit * vision.patch_size for n in small)
                image = interpolate(image.float(), size=size, mode="area").to(own.dtype)
                made = pack_patches(image, unit, vision.patch_size)
            patches.append(made)
        given["grid_thw"] = full_grids.new_tensor(grids)
        self._slots = find_slots(join_targets(targets))
        return (torch.cat(patches), *args[1:]), given


def unpack_patches(patches: Tensor, grid: Sequence[int], unit: int, side: int) -> Tensor:
    """Frames `[t, C * F, H, W]` of a Qwen-VL processor's patches `[t * h * w, C * F * P * P]`.

    Args:
        patches: in blocks of `unit` x `unit`.
        grid: t, h, w.
        unit: patches of a block, along each side.
        side: P, of a patch.
    """
    t, h, w = grid
    x = patches.view(t, h // unit, w // unit, unit, unit, -1, side, side)
    return x.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(t, -1, h * side, w * side)


def pack_patches(frames: Tensor, unit: int, side: int) -> Tensor:
    """The inverse of `unpack_patches`."""
    t, c, height, width = frames.shape
    x = frames.view(t, c, height // (unit * side), unit, side, width // (unit * side), unit, side)
    return x.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, c * side * side)
