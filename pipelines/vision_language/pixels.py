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

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.vision_language.tokens import (
    Places,
    choose_left,
    has_class_token,
)
from mmaccel.pipelines.vision_language.tower_reduction import TowerReduction
from mmaccel.pipelines.vision_language.towers import (
    JOINTS,
    describe_tower,
    find_side,
    find_tower,
    find_unit,
)
from mmaccel.pipelines.vision_language.visuals import Visual
from mmaccel.reduction.visual_tokens.downsample_pixels import DownsamplePixels


class Cells:
    """The cells of a small grid in a full one; h x w places, and h' x w' cells.

    Args:
        full: h, w.
        small: h', w'.

    Attributes:
        cell: `[h * w]` int64, the cell of each place.
        is_middle: `[h * w]` bool, one place of each cell.
        size: `[h' * w']` float32, places of each cell.
    """

    def __init__(self, full: tuple[int, int], small: tuple[int, int]) -> None:
        axes = [torch.arange(n) * m // n for n, m in zip(full, small, strict=True)]
        middles = []
        for axis in axes:
            found = torch.zeros(len(axis), dtype=torch.bool)
            for part in axis.unique():
                own = (axis == part).nonzero()[:, 0]
                found[own[len(own) // 2]] = True
            middles.append(found)
        self.cell = (axes[0][:, None] * small[1] + axes[1]).flatten()
        self.is_middle = (middles[0][:, None] & middles[1]).flatten()
        self.size = self.cell.bincount(minlength=small[0] * small[1]).float()


class PixelReduction(TowerReduction):
    """The encoding of one `generate` call on smaller images.

    Args:
        model: the model.
        method: how much smaller.
        inputs: what `generate` was called with.

    Attributes:
        counts: zeros, as its tokens are not counted.
    """

    ran = False
    changed = False
    counts = (0, 0)

    def __init__(self, model: Any, method: DownsamplePixels, inputs: Mapping[str, Any]) -> None:
        self.method, self._model, self._inputs = method, model, inputs
        self._kind = model.config.model_type
        self._tower = find_tower(model)
        known = describe_tower(model)
        assert known is not None  # see VisionModel
        self._known = known
        self._unit = find_unit(model)
        self._full: tuple[int, int] = (0, 0)  # of a row's features
        self._small: tuple[int, int] = (0, 0)
        self._grids = torch.zeros(0, 3, dtype=torch.float32)

    def hook(self) -> Sequence[Any]:
        behind = self._tower
        if self._kind in JOINTS:
            behind = getattr(self._model.base_model, JOINTS[self._kind].part)
        is_packed = self._known.patches == "packed"
        before = self._shrink_packed if is_packed else self._shrink
        after = self._restore_packed if is_packed else self._restore
        return [
            self._tower.register_forward_pre_hook(before, with_kwargs=True),
            behind.register_forward_hook(after),
        ]

    def find_left(
        self, visuals: Sequence[Visual], places: Sequence[Places]
    ) -> list[tuple[Tensor, Tensor]] | None:
        found = []
        for visual, place in zip(visuals, places, strict=True):
            index = torch.arange(len(visual.features), device=visual.features.device)
            full = self._full
            small = self._small
            source = index
            if self._known.patches == "packed":
                grid = self._inputs[f"{visual.modality}_grid_thw"][visual.index].tolist()
                full, small = self._grids_of(grid)
            elif self._kind not in JOINTS:
                source = place.source
                if not place.tiles:
                    raise UnsupportedModelError(
                        f"{self.method!r}: expected {visual.modality} features that are tokens of "
                        "the encoder, received features that were pooled or resized after it; use "
                        "Downsample"
                    )
            cells = Cells(full, small)
            n = full[0] * full[1]
            inside = source.clamp(0) % n
            cell = cells.cell.to(inside.device)[inside]
            slot = source.clamp(0).div(n, rounding_mode="floor") * len(cells.size) + cell
            left = choose_left(slot, cells.is_middle.to(inside.device)[inside], source >= 0)
            found.append((left, cells.size.to(inside.device)[cell].where(source >= 0, 1.0)))
        return None if all(bool(left.all()) for left, _ in found) else found

    def _shrink(self, _tower: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Rows of pixels `[R, C, H, W]`, made smaller."""
        self._full = self._small = (0, 0)
        if self._is_paused:
            return None
        given = dict(given)
        pixels = given.pop("pixel_values") if "pixel_values" in given else args[0]
        self.ran = True
        patch = find_side(self._tower)
        unit = self._unit
        height, width = (n // (patch * unit) for n in pixels.shape[-2:])
        self._full = height, width
        self._small = small = self.method.shrink(height, width)
        if small == self._full:
            return None
        self.changed = True
        size = tuple(n * patch * unit for n in small)
        given["pixel_values"] = interpolate(pixels.float(), size=size, mode="area").to(pixels.dtype)
        if self._known.interpolates:
            given["interpolate_pos_encoding"] = True
        mask = given.get("patch_attention_mask")
        if mask is not None:
            grid = tuple(n * unit for n in small)
            given["patch_attention_mask"] = adaptive_max_pool2d(mask.float(), grid).bool()
        return (), given

    def _restore(self, _module: Any, _args: Any, output: Any) -> Any:
        if self._small == self._full:
            return None
        cell = Cells(self._full, self._small).cell
        if isinstance(output, Tensor):  # of a projector
            return output[:, cell.to(output.device)]
        special = int(has_class_token(self._model))
        index = torch.cat([torch.arange(special), cell + special])
        states = output.last_hidden_state
        index = index.to(states.device)
        output.last_hidden_state = states[:, index]
        hidden = getattr(output, "hidden_states", None)
        if hidden is not None:
            output.hidden_states = tuple(None if h is None else h[:, index] for h in hidden)
        return output

    def _grids_of(self, grid: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """The grid of features of an image `(t, h, w)` in patches, and the smaller one."""
        full = grid[1] // self._unit, grid[2] // self._unit
        return full, self.method.shrink(*full)

    def _shrink_packed(self, _tower: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Patches `[sum of t * h * w, C * F * P * P]` of images, made smaller, with their grids."""
        self._grids = torch.zeros(0, 3, dtype=torch.float32)
        if self._is_paused:
            return None
        self.ran = True
        given = dict(given)
        pixels = args[0]
        self._grids = given["grid_thw"]
        vision = self._model.config.vision_config
        unit = self._unit
        patches = list[Tensor]()
        grids = list[list[int]]()
        parts = pixels.split(self._grids.prod(1).tolist())
        for own, grid in zip(parts, self._grids.tolist(), strict=True):
            full, small = self._grids_of(grid)
            grids.append([grid[0], small[0] * unit, small[1] * unit])
            made = own
            if small != full:
                image = unpack_patches(own, grid, unit, vision.patch_size)
                self.changed = True
                size = tuple(n * unit * vision.patch_size for n in small)
                image = interpolate(image.float(), size=size, mode="area").to(own.dtype)
                made = pack_patches(image, unit, vision.patch_size)
            patches.append(made)
        given["grid_thw"] = self._grids.new_tensor(grids)
        return (torch.cat(patches), *args[1:]), given

    def _restore_packed(self, _tower: Any, _args: Any, output: Any) -> Any:
        if not len(self._grids):
            return None
        index = list[Tensor]()
        first = 0
        for grid in self._grids.tolist():
            full, small = self._grids_of(grid)
            cell = Cells(full, small).cell
            frames = torch.arange(grid[0])[:, None] * (small[0] * small[1])
            index.append((first + frames + cell).flatten())
            first += grid[0] * small[0] * small[1]
        places = torch.cat(index).to(output.pooler_output.device)
        output.pooler_output = output.pooler_output[places]
        deep = getattr(output, "deepstack_features", None)
        if deep is not None:
            output.deepstack_features = [features[places] for features in deep]
        return output


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
