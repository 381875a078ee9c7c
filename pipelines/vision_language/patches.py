"""Patches that go before the vision encoder, which computes the others alone.

While `generate` encodes its images, a reducer looks at the pixels of every patch and says which
patches go and which of the others stands for each. A patch here is the part of an image that makes
one feature: a block of patches where the tower or a projector joins them. Patches that are left
have the positions that they had.

In towers with a row for each image, tile or frame (`PrunedRows`) patches go in front of the first
layer, when they have their positions; rows of unequal lengths are padded, and attention sees no
padding. A packed tower (`PrunedPack`) receives fewer patches, and with them their positions, the
bounds of the images' sequences, and its windows without what is gone.

Behind the tower every place has the feature of the patch that stands for it. So projectors and
`pack_image_features` work as they are, and `mmaccel.pipelines.vision_language.visual_call` drops
the columns of all but one place. Where features were pooled or resized after the tower
(LLaVA-OneVision's videos) all columns stay, and the encoder alone is cheaper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmaccel.pipelines.prompt_cuts.columns import ChosenColumns
from mmaccel.pipelines.vision_language.encoder import EncoderReduction, TowerRun
from mmaccel.pipelines.vision_language.tower_reduction import (
    TowerReduction,
    find_kept,
    find_slots,
    find_targets,
    join_targets,
    spread_features,
)
from mmaccel.pipelines.vision_language.towers import describe_tower, find_side
from mmaccel.pipelines.vision_language.visuals import Visual
from mmaccel.reduction.visual_tokens.context import make_context
from mmaccel.reduction.visual_tokens.contract import TokenReducer


class PrunedRows(EncoderReduction):
    """The encoding of one call by a tower with a row for each image, tile or frame, of which
    patches go in front of the first layer. R rows, U features of a row.
    """

    weighs = False

    def __init__(
        self, model: Any, method: TokenReducer, inputs: Mapping[str, Any], seeds: Sequence[int]
    ) -> None:
        super().__init__(model, method, inputs, seeds)
        self._before = (0,)
        self._pixels = torch.zeros(0, dtype=torch.float32)
        self._targets: dict[str, Tensor] = {}  # [R, U] int64, by modality

    def target(self, visual: Visual, visuals: Sequence[Visual]) -> Tensor | None:
        run = self.runs.get(visual.modality)
        if run is None or not run.merges:
            return None
        targets = self._targets[visual.modality]
        parts = run.parts
        if self._is_joined:  # a row of the prompt may have its images as one
            lengths = {each.index: len(each.features) // targets.shape[1] for each in visuals}
            parts = [lengths[index] for index in range(len(lengths))]
        first = sum(parts[: visual.index])
        return join_targets(list(targets[first : first + parts[visual.index]]))

    def _begin(self, tower: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        super()._begin(tower, args, given)
        if self._run is not None:
            self._pixels = given["pixel_values"] if "pixel_values" in given else args[0]

    def _end(self, tower: Any, args: Any, output: Any) -> None:
        super()._end(tower, args, output)
        self._pixels = torch.zeros(0, dtype=torch.float32)

    def _choose(
        self, run: TowerRun, index: int, patches: ChosenColumns, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As a method at a layer, by what the pixels of features say."""
        side = find_side(self._tower)
        unit = self._unit
        rows, columns = (n // (side * unit) for n in self._pixels.shape[-2:])
        cut = self._pixels[..., : rows * unit * side, : columns * unit * side]
        blocks = cut.unflatten(-1, (columns, -1)).unflatten(-3, (rows, -1))  # [R, C, h, P, w, P]
        x = blocks.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # [R, U, C * P * P]
        # a feature of which the tower's mask hides a part stays as it is
        own = run.is_patch[:, run.n_special :]
        parts = own.view(len(own), rows, unit, columns, unit)
        where = torch.arange(rows * columns, device=x.device).expand(len(x), -1)
        context = make_context(
            x,
            parts.all(4).all(2).flatten(1),
            row=where.div(columns, rounding_mode="floor"),
            column=where % columns,
            seed=run.seeds,
            offers=("pixels",),
        )
        target = find_targets(self.method.plan(context))
        self._targets[self._modalities[len(self.runs) - 1]] = target
        return self._expand(target, (rows, columns), run, patches), hidden

    def _expand(
        self, target: Tensor, grid: tuple[int, int], run: TowerRun, patches: ChosenColumns
    ) -> Tensor:
        """Which patch stands for each, `[R, N]`, where features `[R, U]` go into others."""
        unit = self._unit
        rows, columns = grid
        width = columns * unit
        patch = torch.arange(rows * unit * width, device=target.device)
        y, x = patch.div(width, rounding_mode="floor"), patch % width
        feature = y.div(unit, rounding_mode="floor") * columns + x.div(unit, rounding_mode="floor")
        stands = target[:, feature]  # [R, S less special tokens]
        to_y = stands.div(columns, rounding_mode="floor") * unit + y % unit
        to_x = stands % columns * unit + x % unit
        special = torch.arange(run.n_special, device=target.device).expand(len(target), -1)
        column = torch.cat([special, run.n_special + to_y * width + to_x], 1)  # [R, S]
        # columns of the sequence, as places among the patches
        place = run.is_patch.cumsum(1) - 1
        itself = torch.arange(patches.index.shape[1], device=target.device)
        return place.gather(1, column.gather(1, patches.index)).where(patches.valid, itself)


class PrunedPack(TowerReduction):
    """The encoding of one call by a packed tower, which receives fewer patches."""

    def __init__(
        self, model: Any, method: TokenReducer, inputs: Mapping[str, Any], seeds: Sequence[int]
    ) -> None:
        super().__init__(model, method, inputs, seeds)
        self._targets: dict[str, list[Tensor]] = {}  # [U] int64 of each image, by modality
        self._slots: Tensor | None = None

    def hook(self) -> Sequence[Any]:
        return [
            self._tower.register_forward_pre_hook(self._drop, with_kwargs=True),
            self._tower.register_forward_hook(self._restore),
        ]

    def target(self, visual: Visual, visuals: Sequence[Visual]) -> Tensor | None:
        return self._targets[visual.modality][visual.index] if self.changed else None

    def _drop(self, _tower: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Patches `[n, P]` without those that go, and what the tower would compute of grids."""
        self._slots = None
        if self._is_paused or len(self._targets) == len(self._modalities):
            return None
        self.ran = True
        pixels, grids = args[0], given["grid_thw"]
        target = join_targets(self._find_targets(pixels, grids))
        kept = find_kept(target)
        block = self._unit**2
        before, after = self.counts
        self.counts = before + len(pixels), after + int(kept.sum()) * block
        if bool(kept.all()):
            return None
        self.changed = True
        self._slots = find_slots(target)
        left = pixels.view(-1, block, pixels.shape[-1])[kept].flatten(0, 1)
        return (left, *args[1:]), {**given, **self._describe(grids, kept)}

    def _find_targets(self, pixels: Tensor, grids: Tensor) -> list[Tensor]:
        """Of each image or video, the features that stand for its features, `[U]` int64."""
        unit = self._unit
        modality = self._modalities[len(self._targets)]
        features = pixels.reshape(len(pixels) // unit**2, -1)
        parts = features.split((grids.prod(1) // unit**2).tolist())
        x = pad_sequence(list(parts), batch_first=True)  # [B, U, P]
        lengths = torch.tensor([len(part) for part in parts], device=x.device, dtype=torch.int64)
        where = torch.arange(x.shape[1], device=x.device)
        columns = (grids[:, 2:] // unit).to(x.device)
        inside = where % (grids[:, 1:2] // unit * (grids[:, 2:] // unit)).to(x.device)
        group = where - inside
        is_ours = where < lengths[:, None]
        context = make_context(
            x,
            is_ours,
            group=group.where(is_ours, 0),
            row=inside.div(columns, rounding_mode="floor"),
            column=inside % columns,
            seed=self._seeds[0],
            offers=("pixels",),
        )
        targets = find_targets(self.method.plan(context))
        found = [own[: len(part)] for own, part in zip(targets, parts, strict=True)]
        self._targets[modality] = found
        return found

    def _describe(self, grids: Tensor, kept: Tensor) -> dict[str, Tensor]:
        """What a tower would compute of grids `[B, 3]`, for the features that are `kept`, `[n]`."""
        from transformers import vision_utils

        unit, block = self._unit, self._unit**2
        tower = describe_tower(self._model)
        assert tower is not None  # see VisionModel
        patches = kept.repeat_interleave(block)
        frames = (grids[:, 1] * grids[:, 2] // block).repeat_interleave(grids[:, 0]).tolist()
        found = {
            "position_ids": vision_utils.get_vision_position_ids(grids, unit)[patches],
            "cu_seqlens": _bounds(kept, frames, block),
        }
        if tower.has_table:
            index, weights = vision_utils.get_vision_interpolation_indices_and_weights(
                grids,
                num_grid_per_side=self._tower.num_grid_per_side,
                mode=self._tower.interpolation_mode,
                align_corners=self._tower.interpolation_align_corners,
                spatial_merge_size=unit,
            )
            found |= {"interp_indices": index[patches], "interp_weights": weights[patches]}
        if tower.has_windows:
            order, bounds = vision_utils.get_vision_window_index(
                grids,
                spatial_merge_size=unit,
                window_size=self._tower.window_size,
                patch_size=find_side(self._tower),
            )
            order = order.to(kept.device)
            lengths = (bounds.diff() // block).tolist()
            found["window_index"] = (kept.cumsum(0) - 1)[order[kept[order]]]
            found["cu_window_seqlens"] = _bounds(kept[order], lengths, block)
        return found

    def _restore(self, _tower: Any, _args: Any, output: Any) -> Any:
        """Features of all places, each that of the one which stands for it."""
        return None if self._slots is None else spread_features(output, self._slots)


def _bounds(kept: Tensor, lengths: Sequence[int], block: int) -> Tensor:
    """Bounds of sequences of patches, int32, `[n + 1]`; those that lost all are none.

    Args:
        kept: features that are left, in the order of the sequences.
        lengths: features of each sequence.
        block: patches of a feature.
    """
    counts = torch.stack([part.sum() for part in kept.split(list(lengths))])
    bounds = torch.nn.functional.pad((block * counts).cumsum(0), (1, 0))
    return bounds.unique_consecutive().to(torch.int32)
