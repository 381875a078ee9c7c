"""Patches that go before the vision encoder, which computes the others alone.

A reducer says from the pixels which patches go, and which of the others stands for each. A patch
here is what makes one feature: a block where the tower or a projector joins them. Those left have
the positions that they had.

In towers with a row for each image, tile or frame, patches go in front of the first layer; rows are
padded, and attention sees no padding. A packed tower receives fewer patches, with their positions,
the bounds of sequences, and windows of what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmaccel.pipelines.hosts.vision_language.tower_run import Level, TowerRun, find_targets
from mmaccel.reduction.visual_tokens.context import make_context
from mmaccel.reduction.visual_tokens.contract import TokenReducer


def prune_rows(
    run: TowerRun, method: TokenReducer, pixels: Tensor, given: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """Choose patches of rows of pixels `[R, C, H, W]`, which leave in front of layer 0."""
    unit, side = run.unit, run.unit * run.side
    rows, columns = (n // unit for n in run.grid)
    cut = pixels[..., : rows * side, : columns * side]
    blocks = cut.unflatten(-1, (columns, -1)).unflatten(-3, (rows, -1))  # [R, C, h, P, w, P]
    x = blocks.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # [R, U, C * P * P]
    # a feature of which the tower's mask hides a part stays as it is
    shown = run.is_patch[:, run.n_special :].view(len(x), *run.grid)
    shown = shown[:, : rows * unit, : columns * unit].view(len(x), rows, unit, columns, unit)
    where = torch.arange(rows * columns, device=x.device).expand(len(x), -1)
    context = make_context(
        x,
        shown.all(4).all(2).flatten(1),
        row=where // columns,
        column=where % columns,
        seed=run.seeds,
        offers=("pixels",),
    )
    run.drop(0, find_targets(method.plan(context)))
    return pixels, given


def prune_pack(
    run: TowerRun, method: TokenReducer, pixels: Tensor, given: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """Patches `[n, P]` without those that go, and what the tower would compute of grids."""
    grids = given["grid_thw"]
    block = run.unit**2
    features = pixels.view(-1, block * pixels.shape[-1])
    counts = (grids.prod(1) // block).tolist()
    x = pad_sequence(list(features.split(counts)), batch_first=True)  # [B, U, P]
    where = torch.arange(x.shape[1], device=x.device)
    lengths = torch.tensor(counts, device=x.device, dtype=torch.int64)[:, None]
    is_ours = where < lengths  # [B, U], no padding
    grid = (grids[:, 1:] // run.unit).to(x.device)  # rows and columns of features
    columns = grid[:, 1:]
    inside = where % grid.prod(1, keepdim=True)  # of its frame, which is `where - inside`
    context = make_context(
        x,
        is_ours,
        group=(where - inside).where(is_ours, 0),
        row=inside.div(columns, rounding_mode="floor"),
        column=inside % columns,
        seed=run.seeds,
        offers=("pixels",),
    )
    targets = find_targets(method.plan(context))
    first = lengths.cumsum(0) - lengths  # feature of each image in the packed sequence
    level = Level(-1, (targets + first)[is_ours][None])
    kept = level.kept[0]
    if bool(kept.all()):
        return pixels, given
    run.target = level.target[0]
    run.levels.append(level)
    left = features[kept].view(-1, pixels.shape[-1])
    return left, {**given, **describe_kept(run, grids, kept)}


def describe_kept(run: TowerRun, grids: Tensor, kept: Tensor) -> dict[str, Tensor]:
    """What a packed tower would compute of grids `[B, 3]`, for features that are `kept`, `[n]`."""
    from transformers import vision_utils

    unit, block, tower = run.unit, run.unit**2, run.tower
    patches = kept.repeat_interleave(block)
    frames = (grids[:, 1] * grids[:, 2] // block).repeat_interleave(grids[:, 0]).tolist()
    arguments = {
        "position_ids": vision_utils.get_vision_position_ids(grids, unit)[patches],
        "cu_seqlens": find_bounds(kept, frames, block),
    }
    if run.known.has_table:
        index, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grids,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=unit,
        )
        arguments |= {"interp_indices": index[patches], "interp_weights": weights[patches]}
    if run.known.has_windows:
        order, bounds = vision_utils.get_vision_window_index(
            grids, spatial_merge_size=unit, window_size=tower.window_size, patch_size=run.side
        )
        order = order.to(kept.device)
        lengths = (bounds.diff() // block).tolist()
        # features that are left, in the order of windows, by their numbers among these
        arguments["window_index"] = (kept.cumsum(0) - 1)[order[kept[order]]]
        arguments["cu_window_seqlens"] = find_bounds(kept[order], lengths, block)
    return arguments


def find_bounds(kept: Tensor, lengths: Sequence[int], block: int) -> Tensor:
    """Bounds `[n + 1]` int32 of sequences of patches, `block` a feature, of which features `kept`
    are left of `lengths` each; sequences that lost all are none.
    """
    counts = torch.stack([part.sum() for part in kept.split(list(lengths))])
    bounds = torch.nn.functional.pad((block * counts).cumsum(0), (1, 0))
    return bounds.unique_consecutive().to(torch.int32)
