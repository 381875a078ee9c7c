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

from mmaccel import DownsamplePixels
from mmaccel.pipelines.vision_language import pixels
from mmaccel.pipelines.vision_language.tower_run import Level, TowerRun
from mmaccel.pipelines.vision_language.towers import find_tower
from tests.fixtures.tiny_vlms import (
    CONFIGS,
    IMAGE,
    EncoderOutput,
    draw_prompts,
    draw_videos,
    shared_vlm,
)
from tests.vision_language.references import (
    PACKED,
    answer_to_features,
    encode,
    rows_of_tower,
    spread_index,
    spreading,
    unit_of,
)
from tests.vision_language.runs import GREEDY, answer, reduces, seen_by_tower

pytestmark = reduces

NAMES = [name for name in CONFIGS if name != "chameleon"]
INTERPOLATES = {"llava", "llava_next", "llava_onevision", "janus", "gemma3"}
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


def expand(full: tuple[int, int], small: tuple[int, int]) -> tuple[list[int], list[int]]:
    """The cell of each place, and the place in the middle of its cell."""
    cells = [(y * small[0] // full[0], x * small[1] // full[1]) for y, x in places_of(full)]
    middles = []
    for cell in cells:
        members = [place for place, own in zip(places_of(full), cells) if own == cell]
        ys, xs = sorted({y for y, _ in members}), sorted({x for _, x in members})
        middles.append(ys[len(ys) // 2] * full[1] + xs[len(xs) // 2])
    return [y * small[1] + x for y, x in cells], middles


def places_of(grid: tuple[int, int]) -> list[tuple[int, int]]:
    return [(y, x) for y in range(grid[0]) for x in range(grid[1])]


def encode_smaller(
    model: Any, name: str, inputs: dict[str, Any], method: Any
) -> tuple[Any, list[int]]:
    """What an encoder makes of smaller images, at all places, and which place stands for each."""
    n = 4 // unit_of(name)
    small = method.shrink(n, n)
    cell, middle = expand((n, n), small)
    rows = len(rows_of_tower(name, inputs))
    stands = [n * n * row + place for row in range(rows) for place in middle]
    if small == (n, n):
        return encode(model, inputs), stands
    own = inputs["pixel_values"]
    size = [4 * unit_of(name) * side for side in small]
    made = [average(image, *size) for image in own.flatten(0, -4)]
    smaller = torch.stack(made).view(*own.shape[:-3], *made[0].shape)
    options = {"interpolate_pos_encoding": True} if name in INTERPOLATES else {}
    with spreading(find_tower(model), [spread_index(name, cell, small[1])]):
        return encode(model, inputs | {"pixel_values": smaller}, **options), stands


@torch.no_grad()
def encode_packed(
    model: Any, inputs: dict[str, Any], method: Any, modality: str
) -> tuple[Any, list[int]]:
    """The same for Qwen-VL: patches of 4 x 4 pixels, two frames deep, in blocks of 2 x 2."""
    key = "pixel_values" if modality == "image" else "pixel_values_videos"
    grids = inputs[f"{modality}_grid_thw"].tolist()
    packed, small_grids, cells, stands = [], [], [], list[int]()
    n_cells = 0
    for (t, h, w), patches in zip(
        grids, inputs[key].split([t * h * w for t, h, w in grids]), strict=True
    ):
        full = (h // 2, w // 2)
        small = method.shrink(*full)
        small_grids.append([t, 2 * small[0], 2 * small[1]])
        cell, middle = expand(full, small)
        own = []
        for _ in range(t):
            stands += [len(stands) + place for place in middle]
            own += [n_cells + place for place in cell]
            n_cells += small[0] * small[1]
        cells.append(own)
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
    function = getattr(model.base_model, f"get_{modality}_features")
    out = function(torch.stack(packed), torch.tensor(small_grids), return_dict=True)

    def places(features: Any) -> list[Tensor]:
        return [torch.cat(list(features))[index] for index in cells]

    made = EncoderOutput(pooler_output=places(out.pooler_output))
    deep = getattr(out, "deepstack_features", None)
    if deep is not None:
        made.deepstack_features = [places(features) for features in deep]
    return made, stands


def reference_answer(
    model: Any, name: str, inputs: dict[str, Any], method: Any, modality: str = "image"
) -> tuple[Tensor, int]:
    """Greedy tokens, and how many visual tokens stay."""
    if name in PACKED:
        made, stands = encode_packed(model, inputs, method, modality)
    else:
        made, stands = encode_smaller(model, name, inputs, method)
    return answer_to_features(model, name, inputs, made, stands, modality)


# -------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("method", [HALF, SOME, DownsamplePixels(n_keep=1)], ids=repr)
@pytest.mark.parametrize("name", NAMES)
def test_the_model_sees_what_the_encoder_makes_of_smaller_images(name: str, method: Any) -> None:
    model = shared_vlm(name, window=512 if name == "gemma3" else None)  # which counts columns
    inputs = draw_prompts(name, model)
    made, stats = answer(model, method, inputs)
    expected, after = reference_answer(model, name, inputs, method)
    assert torch.equal(made, expected)
    before = int((inputs["input_ids"] == IMAGE).sum())
    if after < before:
        assert f"{after} of {before} visual tokens" in stats.reference
        assert stats.exactness == "relaxed"


@pytest.mark.parametrize("name", PACKED)
def test_videos_of_patches(name: str) -> None:
    model = shared_vlm(name)
    inputs = draw_videos(name, model, (2, 3))
    made, stats = answer(model, HALF, inputs)
    assert "10 of 40 visual tokens" in stats.reference
    assert torch.equal(made, reference_answer(model, name, inputs, HALF, "video")[0])


@pytest.mark.parametrize("name", ["llava", "internvl", "qwen2_vl"])
def test_the_encoder_computes_fewer_patches(name: str) -> None:
    model = shared_vlm(name)
    inputs = draw_prompts(name, model)
    with seen_by_tower(model) as whole:
        model.generate(**inputs, **GREEDY)
    with seen_by_tower(model) as seen:
        answer(model, HALF, inputs)
    n_seen, n_whole = (sum(each.numel() for each in found) for found in (seen, whole))
    assert len(seen) == len(whole) and n_seen <= 0.35 * n_whole


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
    assert Level(-1, middles[None]).column[0].tolist() == [0, 0, 1, 2] * 3


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
    restore = TowerRun.restore
    patch.setattr(TowerRun, "restore", lambda *given: restore(*given).roll(2, 1))


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
