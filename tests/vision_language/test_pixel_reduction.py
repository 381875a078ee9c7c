"""Smaller images in front of the encoder.

The reference makes the smaller images with loops, lets the model's own encoder loose on them, and
writes each cell's feature into the places of the full grid. A mask hides all places but one of each
cell from the language model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import DivPrune, DownsamplePixels, FastV
from mmaccel.pipelines.vision_language import pixels
from mmaccel.pipelines.vision_language.tokens import find_places
from mmaccel.pipelines.vision_language.tower_reduction import find_slots
from mmaccel.pipelines.vision_language.towers import find_tower
from mmaccel.pipelines.vision_language.visuals import Visual
from tests.fixtures.tiny_vlms import (
    CONFIGS,
    IMAGE,
    VIDEO,
    EncoderOutput,
    draw_prompts,
    draw_videos,
    shared_vlm,
)
from tests.vision_language.runs import GREEDY, answer, position_ids, reduces

pytestmark = reduces

NAMES = [name for name in CONFIGS if name not in ("gemma3", "chameleon")]
IN_TOWER = {"llava", "llava_next", "llava_onevision", "janus"}
HALF, SOME = DownsamplePixels(keep=0.25), DownsamplePixels(keep=0.6)


# ---------------------------------------------------------------------------- the reference


def average(image: Tensor, height: int, width: int) -> Tensor:
    """`[C, height, width]`, each pixel the mean of those it covers, in part or in whole."""
    rows, columns = image.shape[1:]
    made = torch.empty(len(image), height, width)
    for y in range(height):
        for x in range(width):
            top, bottom = y * rows // height, -(-(y + 1) * rows // height)
            left, right = x * columns // width, -(-(x + 1) * columns // width)
            made[:, y, x] = image[:, top:bottom, left:right].mean((1, 2))
    return made


def expand(full: tuple[int, int], small: tuple[int, int]) -> tuple[list[int], list[bool]]:
    """The cell of each place, and whether it is the middle of its cell."""
    cells = [(y * small[0] // full[0], x * small[1] // full[1]) for y, x in places_of(full)]
    members = {cell: [k for k, own in enumerate(cells) if own == cell] for cell in cells}
    middle = []
    for k, (y, x) in enumerate(places_of(full)):
        ys = sorted({places_of(full)[m][0] for m in members[cells[k]]})
        xs = sorted({places_of(full)[m][1] for m in members[cells[k]]})
        middle.append((y, x) == (ys[len(ys) // 2], xs[len(xs) // 2]))
    return [y * small[1] + x for y, x in cells], middle


def places_of(grid: tuple[int, int]) -> list[tuple[int, int]]:
    return [(y, x) for y in range(grid[0]) for x in range(grid[1])]


@torch.no_grad()
def encode_smaller(
    model: Any, name: str, inputs: dict[str, Any], method: Any
) -> tuple[Any, list[Tensor]]:
    """What an encoder makes of smaller images, at all places, and masks `[n]` of one a cell."""
    given = {k: v for k, v in inputs.items() if k in ("pixel_values", "image_sizes")}
    if name.startswith("qwen"):
        return encode_packed(model, inputs, method)
    unit = 1 if name in IN_TOWER else 2
    full = (4 // unit, 4 // unit)
    small = method.shrink(*full)
    own = given["pixel_values"]
    made = [average(image, *(4 * unit * n for n in small)) for image in own.flatten(0, -4)]
    given["pixel_values"] = torch.stack(made).view(*own.shape[:-3], *made[0].shape)
    cell, middle = expand(full, small)
    if name not in IN_TOWER:
        out = model.base_model.get_image_features(**given, return_dict=True)
        n = small[0] * small[1]
        found, masks = [], []
        for features in out.pooler_output:
            tiles = features.view(-1, n, features.shape[-1])
            found.append(tiles[:, cell].flatten(0, 1))
            masks.append(torch.tensor(middle).repeat(len(tiles)))
        pooled = torch.stack(found) if isinstance(out.pooler_output, Tensor) else found
        return EncoderOutput(pooler_output=pooled), masks
    tower = find_tower(model)
    part = "vision_tower" if hasattr(model.base_model, "vision_tower") else "vision_model"
    special = int(name in ("llava", "llava_next"))

    class Full(torch.nn.Module):
        config, patch_size = tower.config, 4

        def forward(self, pixel_values: Tensor, **options: Any) -> Any:
            out = tower(pixel_values, interpolate_pos_encoding=True, **options)
            index = [*range(special), *(c + special for c in cell)]
            out.last_hidden_state = out.last_hidden_state[:, index]
            if getattr(out, "hidden_states", None):
                states = out.hidden_states
                out.hidden_states = tuple(h if h is None else h[:, index] for h in states)
            return out

    setattr(model.base_model, part, Full())
    try:
        out = model.base_model.get_image_features(**given, return_dict=True)
    finally:
        setattr(model.base_model, part, tower)
    masks = []
    for k, features in enumerate(out.pooler_output):
        visual = Visual("image", k, 0, torch.arange(len(features)), features)
        source = find_places(model, [visual], inputs)[0].source.tolist()
        stays = [False] * len(source)
        for tile in range(max(source) // 16 + 1):
            for own_cell in range(small[0] * small[1]):
                where = [j for j, s in enumerate(source) if s // 16 == tile and s >= 0]
                where = [j for j in where if cell[source[j] % 16] == own_cell]
                best = [j for j in where if middle[source[j] % 16]] or where[:1]
                for j in best:
                    stays[j] = True
        masks.append(torch.tensor(stays))
    return EncoderOutput(pooler_output=out.pooler_output), masks


def encode_packed(
    model: Any, inputs: dict[str, Any], method: Any, modality: str = "image"
) -> tuple[Any, list[Tensor]]:
    """The same for Qwen-VL: patches of 4 x 4 pixels, two frames deep, in blocks of 2 x 2."""
    key = "pixel_values" if modality == "image" else "pixel_values_videos"
    grids = inputs[f"{modality}_grid_thw"].tolist()
    packed, small_grids, cells, masks = [], [], [], []
    for (t, h, w), patches in zip(
        grids, inputs[key].split([t * h * w for t, h, w in grids]), strict=True
    ):
        full = (h // 2, w // 2)
        small = method.shrink(*full)
        small_grids.append([t, 2 * small[0], 2 * small[1]])
        cell, middle = expand(full, small)
        first = sum(len(set(c)) for c in cells)
        cells.append([first + f * small[0] * small[1] + c for f in range(t) for c in cell])
        masks.append(torch.tensor(middle * t))
        order = [
            (2 * y + dy, 2 * x + dx) for y, x in places_of(full) for dy in (0, 1) for dx in (0, 1)
        ]
        for frame in patches.view(t, h * w, 6, 4, 4):
            image = torch.empty(6, 4 * h, 4 * w)
            for patch, (y, x) in zip(frame, order, strict=True):
                image[:, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4] = patch
            image = average(image, 8 * small[0], 8 * small[1])
            for y, x in places_of(small):
                for dy in (0, 1):
                    for dx in (0, 1):
                        top, left = 4 * (2 * y + dy), 4 * (2 * x + dx)
                        packed.append(image[:, top : top + 4, left : left + 4].flatten())
    encode = getattr(model.base_model, f"get_{modality}_features")
    out = encode(torch.stack(packed), torch.tensor(small_grids), return_dict=True)

    def places(features: Any) -> list[Tensor]:
        return [torch.cat(list(features))[index] for index in cells]

    made = EncoderOutput(pooler_output=places(out.pooler_output))
    deep = getattr(out, "deepstack_features", None)
    if deep is not None:
        made.deepstack_features = [places(features) for features in deep]
    return made, masks


@torch.no_grad()
def reference_answer(
    model: Any, name: str, inputs: dict[str, Any], method: Any, modality: str = "image"
) -> tuple[Tensor, Tensor]:
    """Greedy tokens, and the columns that stay."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if modality == "video":
        made, masks = encode_packed(model, inputs, method, "video")
    else:
        made, masks = encode_smaller(model, name, inputs, method)
    stays = mask.clone()
    stays[ids == (IMAGE if modality == "image" else VIDEO)] = torch.cat(masks).long()
    positions = position_ids(name, model, inputs)
    given = {k: v for k, v in inputs.items() if not k.startswith("pixel")}
    given |= {"mm_encoder_outputs": {modality: made}, "position_ids": positions}
    return model.generate(**given | {"attention_mask": stays}, **GREEDY), stays


# -------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("method", [HALF, SOME, DownsamplePixels(n_keep=1)], ids=repr)
@pytest.mark.parametrize("name", NAMES)
def test_the_model_sees_what_the_encoder_makes_of_smaller_images(name: str, method: Any) -> None:
    model = shared_vlm(name)
    inputs = draw_prompts(name, model)
    made, stats = answer(model, method, inputs)
    expected, stays = reference_answer(model, name, inputs, method)
    assert torch.equal(made, expected)
    before = int((inputs["input_ids"] == IMAGE).sum())
    after = int((stays * (inputs["input_ids"] == IMAGE)).sum())
    if after < before:
        assert f"{after} of {before} visual tokens" in stats.reference
        assert stats.exactness == "relaxed"


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_videos_of_patches(name: str) -> None:
    model = shared_vlm(name)
    inputs = draw_videos(name, model, (2, 3))
    made, stats = answer(model, HALF, inputs)
    assert "10 of 40 visual tokens" in stats.reference
    assert torch.equal(made, reference_answer(model, name, inputs, HALF, "video")[0])


@pytest.mark.parametrize("name", NAMES)
def test_the_encoder_computes_fewer_patches(name: str) -> None:
    model = shared_vlm(name)
    inputs, counts = draw_prompts(name, model), list[int]()
    tower = getattr(model.base_model, "visual", None) or find_tower(model)
    hooks = [
        module.mlp.register_forward_pre_hook(lambda _m, args: counts.append(args[0].numel()))
        for module in tower.modules()
        if hasattr(module, "mlp") and not hasattr(module, "probe")
    ]
    model.generate(**inputs, **GREEDY)
    whole = counts.copy()
    counts.clear()
    answer(model, HALF, inputs)
    for hook in hooks:
        hook.remove()
    assert len(counts) == len(whole) and sum(counts) <= 0.35 * sum(whole)


def test_it_composes_with_methods_behind_it() -> None:
    model = shared_vlm("llava_next")
    inputs = draw_prompts("llava_next", model, (1, 1))
    methods = [FastV(keep=0.5), DivPrune(keep=0.5), HALF]
    made, stats = answer(model, methods, inputs)
    n = int((inputs["input_ids"] == IMAGE).sum())
    assert f"16 of {n} visual tokens, 8 of 16 visual tokens after layer 2" in stats.reference
    assert torch.equal(answer(model, methods, inputs, mmaccel.Jacobi(4))[0], made)


def test_padding_of_an_image_stays_padding() -> None:
    model = shared_vlm("idefics3")
    inputs, seen = draw_prompts("idefics3", model), list[Tensor]()
    mask = torch.ones(*inputs["pixel_values"].shape[:2], 16, 16)
    mask[0, 0, 8:] = 0
    hook = find_tower(model).embeddings.register_forward_pre_hook(
        lambda _m, _a, given: seen.append(given["patch_attention_mask"]), with_kwargs=True
    )
    answer(model, HALF, inputs | {"pixel_attention_mask": mask})
    hook.remove()
    assert seen[0].tolist() == [[[True] * 2, [False] * 2], *[[[True] * 2] * 2] * 2]


def test_cells_of_a_grid() -> None:
    middles = pixels.find_middles((3, 4), (1, 3))
    assert middles.tolist() == [5, 5, 6, 7] * 3
    assert find_slots(middles).tolist() == [0, 0, 1, 2] * 3


def test_both_sides_shrink_by_the_root() -> None:
    for method, small in (
        (HALF, (12, 17)),
        (DownsamplePixels(keep=0.5), (17, 24)),
        (DownsamplePixels(keep=0.001), (1, 1)),
        (DownsamplePixels(n_keep=204), (12, 17)),
        (DownsamplePixels(n_keep=999), (24, 34)),
    ):
        assert method.shrink(24, 34) == small


def _cells(patch: pytest.MonkeyPatch) -> None:
    slots = pixels.find_slots
    patch.setattr(pixels, "find_slots", lambda target: slots(target).roll(2))


def _order(patch: pytest.MonkeyPatch) -> None:
    pack = pixels.pack_patches
    patch.setattr(pixels, "pack_patches", lambda x, unit, side: pack(x.mT, unit, side))


def _nearest(patch: pytest.MonkeyPatch) -> None:
    own = pixels.interpolate
    patch.setattr(pixels, "interpolate", lambda x, size, mode: own(x, size=size, mode="nearest"))


BUGS = {
    "cells shifted": (_cells, "llava"),
    "rows and columns swapped": (_order, "qwen2_vl"),
    "every second pixel": (_nearest, "internvl"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, name = BUGS[bug]
    model = shared_vlm(name)
    inputs = draw_prompts(name, model)
    expected, _ = reference_answer(model, name, inputs, HALF)
    plant(monkeypatch)
    assert not torch.equal(answer(model, HALF, inputs)[0], expected)
