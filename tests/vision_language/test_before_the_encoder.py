"""Methods in front of the encoder: patches that go, and smaller images.

The reference of patches chooses them with loops over a synthetic screen, and runs the model's own
encoder over all patches under masks that hide those which went: a row's in towers of rows, an
image's in packed ones. That of smaller images makes them with loops, and lets the encoder loose on
them. The language model gets the features of all places, all but one for each place under a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import mmaccel
from mmaccel import DownsamplePixels, PixelPrune
from mmaccel.pipelines.hosts.vision_language import patches, pixels
from mmaccel.pipelines.hosts.vision_language.towers import find_tower
from mmaccel.reduction.visual_tokens import pixel_prune
from tests.fixtures.lanes import mostly_slow
from tests.fixtures.tiny_lms import falls_back
from tests.fixtures.tiny_vlms import CONFIGS, IMAGE, draw_prompts, draw_videos
from tests.reduction.test_references import slow_pixel_prune
from tests.vision_language.references import (
    PACKED,
    WITH_CLASS,
    answer_to_features,
    at_places,
    encode,
    rows_of_tower,
    spread_index,
    spreading,
    unit_of,
)
from tests.vision_language.runs import (
    GREEDY,
    answer,
    reduces,
    seen_by_tower,
    shared_looking,
)

pytestmark = reduces

NAMES = [name for name in CONFIGS if name != "chameleon"]
INTERPOLATES = {"llava", "llava_next", "llava_onevision", "janus", "gemma3"}
SCREEN, HALF = PixelPrune(), DownsamplePixels(keep=0.25)
METHODS = [
    SCREEN, PixelPrune(threshold=1.0), HALF, DownsamplePixels(keep=0.6), DownsamplePixels(n_keep=1),
]  # fmt: skip


def colour(squares: list[Tensor], rng: torch.Generator) -> None:
    """Two thirds of the squares of images, in one of two colours."""
    for square in squares:
        chosen = int(torch.randint(3, (1,), generator=rng))
        if chosen < 2:
            square[:] = 0.25 + chosen


def draw_screen(name: str, model: Any, per_row: Any = (2, 0, 1), videos: Any = ()) -> Any:
    """A call whose images, or videos, are screens: areas of one colour, and some noise."""
    inputs = draw_videos(name, model, videos) if videos else draw_prompts(name, model, per_row)
    rng = torch.Generator().manual_seed(3)
    pixels = inputs["pixel_values_videos" if videos else "pixel_values"]
    if name in PACKED:
        colour(list(pixels.view(-1, 4, pixels.shape[-1])), rng)
        return inputs
    side = 4 * unit_of(name)
    for image in pixels.flatten(0, -4):
        if image.any():  # images of zeros are none to Idefics3
            colour([image[..., y : y + side, x : x + side] for y in range(0, 16, side)
                    for x in range(0, 16, side)], rng)  # fmt: skip
    return inputs


# ---------------------------------------------------------------------- the reference: patches


@contextmanager
def hiding(tower: Any, hidden: list[Tensor]) -> Iterator[None]:
    """Attention of a tower under masks `[R, S]` of what no token sees, for the rows of a call or,
    one after the other, for the sequences of a packed one.
    """
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    calls = 0

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **given: Any):
        nonlocal calls
        mask = hidden[calls % len(hidden)]
        calls += 1
        bias = torch.zeros(mask.shape).masked_fill(mask, -1e9)[:, None, None]
        bias = bias.expand(-1, 1, query.shape[2], -1)
        given |= {"attention_mask": bias, "is_causal": False}
        return own(module, query, key, value, **given)

    ALL_ATTENTION_FUNCTIONS.register("hiding", attend)
    before = tower.config._attn_implementation
    tower.set_attn_implementation("hiding")
    try:
        yield
    finally:
        tower.set_attn_implementation(before)


@torch.no_grad()
def prune_rows(
    model: Any, name: str, inputs: dict[str, Any], modality: str, method: Any
) -> tuple[Any, list[int]]:
    """Features of all places under hidden patches, and which place stands for each."""
    unit, special = unit_of(name), int(name in WITH_CLASS)
    n = 4 // unit
    rows = [image for image, _, _ in rows_of_tower(name, inputs)]
    squares = [image.unfold(1, 4 * unit, 4 * unit).unfold(2, 4 * unit, 4 * unit) for image in rows]
    chosen = [
        slow_pixel_prune(each.permute(1, 2, 0, 3, 4).reshape(n * n, -1), n, method.threshold)
        for each in squares
    ]
    hidden = torch.zeros(len(rows), special + 16, dtype=torch.bool)
    for row, own in enumerate(chosen):
        for patch in range(16):
            feature = patch // 4 // unit * n + patch % 4 // unit
            hidden[row, special + patch] = own[feature] != feature
    tower = find_tower(model)
    index = [spread_index(name, own, n) for own in chosen]
    with spreading(tower, index), hiding(tower, [hidden]):
        made = encode(model, inputs, modality)
    return made, [n * n * row + place for row, own in enumerate(chosen) for place in own]


@torch.no_grad()
def prune_packed(
    model: Any, name: str, inputs: dict[str, Any], modality: str, method: Any
) -> tuple[Any, list[int]]:
    """The same for Qwen-VL: a sequence a frame, and windows of 4 x 4 patches in one class."""
    key = "pixel_values" if modality == "image" else "pixel_values_videos"
    grids = inputs[f"{modality}_grid_thw"]
    frames, stands, lengths = [], list[int](), []
    parts = inputs[key].split(grids.prod(1).tolist())
    for (t, h, w), own in zip(grids.tolist(), parts, strict=True):
        lengths.append(t * h * w // 4)
        for frame in own.view(t, h * w // 4, -1):
            chosen = slow_pixel_prune(frame, w // 2, method.threshold)
            stands += [len(stands) + place for place in chosen]
            gone = torch.tensor([place != k for k, place in enumerate(chosen)])
            frames.append(gone.repeat_interleave(4))
    hidden = [frame[None] for frame in frames]
    if name == "qwen2_5_vl":
        windows = window_masks(grids, torch.cat(frames))  # in whose order a frame's patches are
        hidden = [own for frame in windows for own in frame]
        hidden += [torch.cat(frame, 1) for frame in windows]
    with hiding(model.base_model.visual, hidden):
        out = encode(model, inputs, modality)
    return at_places(out, list(torch.tensor(stands).split(lengths))), stands


def window_masks(grids: Tensor, hidden: Tensor) -> list[list[Tensor]]:
    """Of each frame's windows, which have 2 x 2 features."""
    found = []
    first = 0
    for t, h, w in grids.tolist():
        for _ in range(t):
            windows = []
            for top in range(0, h // 2, 2):
                for left in range(0, w // 2, 2):
                    features = [
                        first + y * (w // 2) + x
                        for y in range(top, min(top + 2, h // 2))
                        for x in range(left, min(left + 2, w // 2))
                    ]
                    windows.append(hidden.view(-1, 4)[features].view(1, -1))
            found.append(windows)
            first += h * w // 4
    return found


# --------------------------------------------------------------- the reference: smaller images


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


def places_of(grid: tuple[int, int]) -> list[tuple[int, int]]:
    return [(y, x) for y in range(grid[0]) for x in range(grid[1])]


def expand(full: tuple[int, int], small: tuple[int, int]) -> tuple[list[int], list[int]]:
    """The cell of each place, and the place in the middle of its cell."""
    cells = [(y * small[0] // full[0], x * small[1] // full[1]) for y, x in places_of(full)]
    middles = []
    for cell in cells:
        members = [place for place, own in zip(places_of(full), cells) if own == cell]
        ys, xs = sorted({y for y, _ in members}), sorted({x for _, x in members})
        middles.append(ys[len(ys) // 2] * full[1] + xs[len(xs) // 2])
    return [y * small[1] + x for y, x in cells], middles


@torch.no_grad()
def shrink_rows(
    model: Any, name: str, inputs: dict[str, Any], modality: str, method: Any
) -> tuple[Any, list[int]]:
    """What an encoder makes of smaller images, at all places, and which place stands for each."""
    n = 4 // unit_of(name)
    small = method.shrink(n, n)
    cell, middle = expand((n, n), small)
    rows = len(rows_of_tower(name, inputs))
    stands = [n * n * row + place for row in range(rows) for place in middle]
    if small == (n, n):
        return encode(model, inputs, modality), stands
    key = "pixel_values" if modality == "image" else "pixel_values_videos"
    own = inputs[key]
    size = [4 * unit_of(name) * side for side in small]
    made = [average(image, *size) for image in own.flatten(0, -4)]
    smaller = torch.stack(made).view(*own.shape[:-3], *made[0].shape)
    options = {"interpolate_pos_encoding": True} if name in INTERPOLATES else {}
    with spreading(find_tower(model), [spread_index(name, cell, small[1])]):
        return encode(model, inputs | {key: smaller}, modality, **options), stands


@torch.no_grad()
def shrink_packed(
    model: Any, name: str, inputs: dict[str, Any], modality: str, method: Any
) -> tuple[Any, list[int]]:
    """The same for Qwen-VL: patches of 4 x 4 pixels, two frames deep, in blocks of 2 x 2."""
    key = "pixel_values" if modality == "image" else "pixel_values_videos"
    grids = inputs[f"{modality}_grid_thw"].tolist()
    packed, small_grids, cells, stands = [], [], [], list[int]()
    n_cells = 0
    parts = inputs[key].split([t * h * w for t, h, w in grids])
    for (t, h, w), packed_frames in zip(grids, parts, strict=True):
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
        for frame in packed_frames.view(t, h * w, 6, 4, 4):
            image = torch.empty(6, 4 * h, 4 * w)
            for patch, (y, x) in zip(frame, order, strict=True):
                image[:, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4] = patch
            image = average(image, 8 * small[0], 8 * small[1])
            for y, x in places_of(small):
                for dy in (0, 1):
                    for dx in (0, 1):
                        top, left = 4 * (2 * y + dy), 4 * (2 * x + dx)
                        packed.append(image[:, top : top + 4, left : left + 4].flatten())
    smaller = {key: torch.stack(packed), f"{modality}_grid_thw": torch.tensor(small_grids)}
    return at_places(encode(model, smaller, modality), cells), stands


def reference_answer(
    model: Any, name: str, inputs: dict[str, Any], method: Any, modality: str = "image"
) -> tuple[Tensor, int]:
    """Greedy tokens, and how many visual tokens stay."""
    is_packed = name in PACKED
    if isinstance(method, PixelPrune):
        encode_fewer = prune_packed if is_packed else prune_rows
    else:
        encode_fewer = shrink_packed if is_packed else shrink_rows
    made, stands = encode_fewer(model, name, inputs, modality, method)
    return answer_to_features(model, name, inputs, made, stands, modality)


# -------------------------------------------------------------------------------- the tests


FAST = ("llava_next", "internvl", "qwen2_5_vl", "qwen3_vl")


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("name", mostly_slow(NAMES, *FAST))
def test_the_rest_is_what_the_reference_encodes(name: str, method: Any) -> None:
    model = shared_looking(name)
    inputs = draw_screen(name, model)
    made, stats = answer(model, method, inputs)
    expected, after = reference_answer(model, name, inputs, method)
    before = int((inputs["input_ids"] == IMAGE).sum())
    assert torch.equal(made, expected)
    is_whole = after == before
    assert is_whole == (method.keep == 0.6 and unit_of(name) == 2 and name not in PACKED)
    assert (stats.exactness == "bitwise") == is_whole
    assert is_whole or f"{after} of {before} visual tokens" in stats.reference


@pytest.mark.parametrize("method", [SCREEN, HALF], ids=repr)
@pytest.mark.parametrize("name", [*PACKED, "llava_onevision"])
def test_frames_of_videos_are_encoded_one_by_one(name: str, method: Any) -> None:
    """In one class they are pooled then: all features stay."""
    model = shared_looking(name)
    inputs = draw_screen(name, model, videos=(3, 3) if name == "llava_onevision" else (2, 3))
    made, stats = answer(model, method, inputs)
    expected, after = reference_answer(model, name, inputs, method, "video")
    assert torch.equal(made, expected) and "tokens of its encoder" in stats.reference
    said = "" if name == "llava_onevision" else f"{after} of 40 visual tokens"
    assert said in stats.reference and ("visual tokens" in stats.reference) == bool(said)


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_what_differs_never_goes(name: str, stays: list[Tensor]) -> None:
    model = shared_looking(name)
    inputs = draw_prompts(name, model)  # noise
    made, stats = answer(model, SCREEN, inputs)
    assert torch.equal(made, model.generate(**inputs, **GREEDY))
    assert stats.exactness == "bitwise" and not stays


@pytest.mark.parametrize("method", [PixelPrune(keep=0.25), HALF], ids=repr)
@pytest.mark.parametrize("name", ["llava", "internvl", "qwen3_vl"])
def test_the_encoder_computes_fewer_patches(name: str, method: Any) -> None:
    model = shared_looking(name)
    inputs = draw_screen(name, model)
    with seen_by_tower(model) as whole:
        model.generate(**inputs, **GREEDY)
    with seen_by_tower(model) as seen:
        answer(model, method, inputs)
    n_seen, n_whole = (sum(each.numel() for each in found) for found in (seen, whole))
    assert len(seen) == len(whole) and n_seen <= 0.4 * n_whole


def test_features_of_which_the_tower_hides_a_part_stay() -> None:
    model = shared_looking("idefics3")
    inputs = draw_prompts("idefics3", model, (1,))
    inputs["pixel_values"][:] = 1.0
    mask = torch.ones(*inputs["pixel_values"].shape[:2], 16, 16)
    mask[..., 8:, :] = 0
    stats = answer(model, SCREEN, inputs | {"pixel_attention_mask": mask})[1]
    assert "3 of 4 visual tokens" in stats.reference  # two of four features are padding


def test_padding_of_an_image_stays_padding() -> None:
    model = shared_looking("idefics3")
    inputs, seen = draw_prompts("idefics3", model), list[Tensor]()
    mask = torch.ones(*inputs["pixel_values"].shape[:2], 16, 16)
    mask[0, 0, 8:] = 0
    hook = find_tower(model).embeddings.register_forward_pre_hook(
        lambda _m, _a, given: seen.append(given["patch_attention_mask"]), with_kwargs=True
    )
    answer(model, HALF, inputs | {"pixel_attention_mask": mask})
    hook.remove()
    assert seen[0].tolist() == [[[True] * 2, [False] * 2], *[[[True] * 2] * 2] * 2]


def test_both_sides_shrink_by_the_root() -> None:
    for method, small in (
        (HALF, (12, 17)),
        (DownsamplePixels(keep=0.5), (17, 24)),
        (DownsamplePixels(keep=0.001), (1, 1)),
        (DownsamplePixels(n_keep=204), (12, 17)),
        (DownsamplePixels(n_keep=999), (24, 34)),
    ):
        assert method.shrink(24, 34) == small


def _own_loop(model: Any, ids: Tensor, **given: Any) -> Tensor:
    return model._sample(ids, **given)


UNSERVED: dict[str, Any] = {
    "beam search": {"num_beams": 2},
    "a prompt of embeddings": {},
    "in the encoder with custom_generate": {"custom_generate": _own_loop},
}


@pytest.mark.parametrize("reason", UNSERVED)
@pytest.mark.parametrize(
    ("name", "method"),
    [("llava", mmaccel.ToMe(keep=0.4)), ("internvl", HALF), ("qwen3_vl", SCREEN)],
)
def test_calls_that_are_not_served_have_whole_images(name: str, method: Any, reason: str) -> None:
    model = shared_looking(name)
    call = draw_screen(name, model) | UNSERVED[reason]  # which has equal patches, too
    if "embeddings" in reason:
        call["inputs_embeds"] = model.get_input_embeddings()(call.pop("input_ids"))
    own = model.generate(**call, **GREEDY)
    with falls_back(model, reason, visual_tokens=method) as run:
        made = model.generate(**call, **GREEDY)
    assert torch.equal(made, own) and run.stats.reference == ""


def _swapped(patch: pytest.MonkeyPatch) -> None:
    own = patches.find_targets

    def swapped(plan: Any) -> Tensor:
        turned = torch.arange(16) % 4 * 4 + torch.arange(16) // 4
        return turned[own(plan)][:, turned]

    patch.setattr(patches, "find_targets", swapped)


def _one_sequence(patch: pytest.MonkeyPatch) -> None:
    own = patches.find_bounds

    def joined(*args: Any) -> Tensor:
        return own(*args)[[0, -1]]

    patch.setattr(patches, "find_bounds", joined)


def _from_the_left(patch: pytest.MonkeyPatch) -> None:
    own = pixel_prune.PixelPrune._differ

    def near(first: Tensor, second: Tensor) -> Tensor:
        return own(first[..., :1], second[..., :1])

    patch.setattr(pixel_prune.PixelPrune, "_differ", staticmethod(near))


def _order(patch: pytest.MonkeyPatch) -> None:
    pack = pixels.pack_patches
    patch.setattr(pixels, "pack_patches", lambda x, unit, side: pack(x.mT, unit, side))


BUGS = {
    "rows and columns swapped": (_swapped, "llava", SCREEN),
    "images see each other": (_one_sequence, "qwen2_vl", SCREEN),
    "windows see each other": (_one_sequence, "qwen2_5_vl", SCREEN),
    "one pixel is compared": (_from_the_left, "internvl", SCREEN),
    "pixels turned": (_order, "qwen2_vl", HALF),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, name, method = BUGS[bug]
    model = shared_looking(name)
    inputs = draw_screen(name, model)
    if bug.startswith("one pixel"):  # squares that begin alike
        inputs["pixel_values"][..., ::8, ::8] = 0.0
    if bug.startswith("pixels"):  # noise
        inputs = draw_prompts(name, model)
    expected, _ = reference_answer(model, name, inputs, method)
    plant(monkeypatch)
    assert not torch.equal(answer(model, method, inputs)[0], expected)
