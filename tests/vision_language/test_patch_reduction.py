"""Patches that go in front of the encoder.

The reference chooses the patches with loops over a synthetic screen, and runs the model's own
encoder over all patches under masks that hide those which went: a row's in towers of rows, an
image's in packed ones. The language model behind it gets the features of the patches that stayed,
under a mask of columns.
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
from mmaccel import DivPrune, FastV, PixelPrune
from mmaccel.pipelines.vision_language import patches
from mmaccel.pipelines.vision_language.towers import find_tower
from mmaccel.reduction.visual_tokens import pixel_prune
from tests.fixtures.tiny_vlms import (
    CONFIGS,
    IMAGE,
    EncoderOutput,
    draw_prompts,
    draw_videos,
)
from tests.vision_language.references import (
    PACKED,
    WITH_CLASS,
    answer_to_features,
    encode,
    rows_of_tower,
    spread_index,
    spreading,
    unit_of,
)
from tests.vision_language.runs import GREEDY, answer, reduces, seen_by_tower, shared_looking

pytestmark = reduces

NAMES = [name for name in CONFIGS if name != "chameleon"]
SCREEN = PixelPrune()


def draw_screen(name: str, model: Any, per_row: Any = (2, 0, 1)) -> dict[str, Any]:
    """A prompt whose images are screens: areas of one colour, and some noise."""
    inputs = draw_prompts(name, model, per_row)
    rng = torch.Generator().manual_seed(3)
    own = inputs["pixel_values"]
    if name in PACKED:
        inputs["pixel_values"] = paint(own, inputs["image_grid_thw"], rng)
        return inputs
    side = 4 * unit_of(name)
    images = own.flatten(0, -4)
    for image in images:
        if image.any():  # images of zeros are none to Idefics3
            colour_areas(image, side, rng)
    inputs["pixel_values"] = images.view(own.shape)
    return inputs


def colour_areas(image: Tensor, side: int, rng: torch.Generator) -> None:
    """Paints two thirds of the squares of an image `[C, H, W]` in one of two colours."""
    height, width = image.shape[-2:]
    for y in range(0, height, side):
        for x in range(0, width, side):
            colour = int(torch.randint(3, (1,), generator=rng))
            if colour < 2:
                image[..., y : y + side, x : x + side] = 0.25 + colour


def paint(packed: Tensor, grids: Tensor, rng: torch.Generator) -> Tensor:
    """The same for the patches of Qwen-VL, in blocks of four."""
    made = packed.clone()
    for block in made.view(-1, 4, packed.shape[-1]):
        colour = int(torch.randint(3, (1,), generator=rng))
        if colour < 2:
            block[:] = 0.25 + colour
    return made


# ---------------------------------------------------------------------------- the reference


def choose(x: Tensor, rows: int, columns: int, threshold: float = 0.0) -> list[int]:
    """For each patch of a grid `[N, P]` the one that stands for it, one patch after the other."""
    stands: list[int] = []

    def differ(first: int, second: int) -> bool:
        return bool((x[first] - x[second]).abs().max() > threshold)

    for k in range(rows * columns):
        row, column = divmod(k, columns)
        left = stands[k - 1] if column else None
        above = stands[k - columns] if row else None
        guess = left if above is None else above
        if left is not None and above is not None:
            corner = stands[k - columns - 1]
            is_vertical_edge = not differ(corner, left) and differ(corner, above)
            guess = above if is_vertical_edge else left
        stands.append(k if guess is None or differ(k, guess) else guess)
    return stands


def blocks_of(image: Tensor, side: int) -> Tensor:
    """The squares of an image `[C, H, W]`, row by row, `[N, P]`."""
    height, width = image.shape[-2:]
    found = [
        image[:, y : y + side, x : x + side].flatten()
        for y in range(0, height, side)
        for x in range(0, width, side)
    ]
    return torch.stack(found)


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


def encode_rows(
    model: Any, name: str, inputs: dict[str, Any], modality: str, threshold: float
) -> tuple[Any, list[int]]:
    """Features of all places under hidden patches, and which place stands for each."""
    unit, special = unit_of(name), int(name in WITH_CLASS)
    n = 4 // unit
    rows = [image for image, _, _ in rows_of_tower(name, inputs)]
    chosen = [choose(blocks_of(image, 4 * unit), n, n, threshold) for image in rows]
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
def encode_packed(
    model: Any, inputs: dict[str, Any], modality: str, threshold: float
) -> tuple[Any, list[int]]:
    """The same for Qwen-VL: a sequence a frame, and windows of 4 x 4 patches in one class."""
    key = "pixel_values" if modality == "image" else "pixel_values_videos"
    grids = inputs[f"{modality}_grid_thw"]
    frames, stands = [], []
    for (t, h, w), own in zip(
        grids.tolist(), inputs[key].split(grids.prod(1).tolist()), strict=True
    ):
        blocks = own.view(t, h * w // 4, -1)
        found = []
        for frame in blocks:
            one = choose(frame, h // 2, w // 2, threshold)
            found += [place + len(found) // len(one) * len(one) for place in one]
            frames.append(torch.tensor([one[k] != k for k in range(len(one))]).repeat_interleave(4))
        stands.append(torch.tensor(found))
    tower = model.base_model.visual
    hidden = [frame[None] for frame in frames]
    if model.config.model_type == "qwen2_5_vl":
        windows = window_masks(grids, torch.cat(frames))  # in whose order a frame's patches are
        hidden = [own for frame in windows for own in frame]
        hidden += [torch.cat(frame, 1) for frame in windows]
    encode = getattr(model.base_model, f"get_{modality}_features")
    with hiding(tower, hidden):
        out = encode(inputs[key], grids, return_dict=True)
    pooled = [f[own] for f, own in zip(out.pooler_output, stands, strict=True)]
    made = EncoderOutput(pooler_output=pooled)
    deep = getattr(out, "deepstack_features", None)
    if deep is not None:
        made.deepstack_features = [
            [f[own] for f, own in zip(layer, stands, strict=True)] for layer in deep
        ]
    first, places = 0, list[int]()
    for own in stands:
        places += [first + place for place in own.tolist()]
        first += len(own)
    return made, places


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


def reference_answer(
    model: Any, name: str, inputs: dict[str, Any], modality: str = "image", threshold: float = 0.0
) -> tuple[Tensor, int]:
    """Greedy tokens, and how many visual tokens stay."""
    if name in PACKED:
        made, stands = encode_packed(model, inputs, modality, threshold)
    else:
        made, stands = encode_rows(model, name, inputs, modality, threshold)
    return answer_to_features(model, name, inputs, made, stands, modality)


# -------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("threshold", [0.0, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_repetitions_go_and_the_rest_is_as_if_they_were_hidden(name: str, threshold: float) -> None:
    model = shared_looking(name)
    inputs = draw_screen(name, model)
    made, stats = answer(model, PixelPrune(threshold=threshold), inputs)
    expected, after = reference_answer(model, name, inputs, threshold=threshold)
    before = int((inputs["input_ids"] == IMAGE).sum())
    assert after < before and f"{after} of {before} visual tokens" in stats.reference
    assert torch.equal(made, expected) and stats.exactness == "relaxed"


@pytest.mark.parametrize("name", PACKED)
def test_frames_of_videos_are_pruned_one_by_one(name: str) -> None:
    model = shared_looking(name)
    inputs = draw_videos(name, model, (2, 3))
    rng = torch.Generator().manual_seed(4)
    pixels = paint(inputs["pixel_values_videos"], inputs["video_grid_thw"], rng)
    inputs["pixel_values_videos"] = pixels
    made, stats = answer(model, SCREEN, inputs)
    expected, after = reference_answer(model, name, inputs, "video")
    assert f"{after} of 40 visual tokens" in stats.reference
    assert torch.equal(made, expected)


def test_features_that_were_pooled_all_stay() -> None:
    model = shared_looking("llava_onevision")
    inputs = draw_videos("llava_onevision", model, (3, 3))
    rng = torch.Generator().manual_seed(4)
    for frame in inputs["pixel_values_videos"].flatten(0, 1):
        colour_areas(frame, 4, rng)
    made, stats = answer(model, SCREEN, inputs)
    expected, _ = reference_answer(model, "llava_onevision", inputs, "video")
    assert torch.equal(made, expected) and "of 96 tokens of its encoder" in stats.reference
    assert "visual tokens" not in stats.reference


@pytest.mark.parametrize("name", NAMES)
def test_what_differs_never_goes(name: str, stays: list[Tensor]) -> None:
    model = shared_looking(name)
    inputs = draw_prompts(name, model)  # noise
    made, stats = answer(model, SCREEN, inputs)
    assert torch.equal(made, model.generate(**inputs, **GREEDY))
    assert stats.exactness == "bitwise" and not stays


@pytest.mark.parametrize("name", NAMES)
def test_the_encoder_computes_fewer_patches(name: str) -> None:
    model = shared_looking(name)
    inputs = draw_screen(name, model)
    with seen_by_tower(model) as whole:
        model.generate(**inputs, **GREEDY)
    with seen_by_tower(model) as seen:
        answer(model, PixelPrune(keep=0.25), inputs)
    n_seen, n_whole = (sum(each.numel() for each in found) for found in (seen, whole))
    assert len(seen) == len(whole) and n_seen <= 0.4 * n_whole


def test_it_composes_with_methods_behind_it() -> None:
    model = shared_looking("qwen3_vl")
    inputs = draw_screen("qwen3_vl", model, (1, 1))
    methods = [DivPrune(keep=0.5), SCREEN]
    made, stats = answer(model, methods, inputs)
    n = int((inputs["input_ids"] == IMAGE).sum())
    assert f"of {n} visual tokens" in stats.reference
    assert torch.equal(answer(model, methods, inputs, mmaccel.Jacobi(4))[0], made)
    model = shared_looking("llava_next")
    inputs = draw_screen("llava_next", model, (1, 1))
    assert "after layer 2" in answer(model, [FastV(keep=0.5), SCREEN], inputs)[1].reference


def test_features_of_which_the_tower_hides_a_part_stay() -> None:
    model = shared_looking("idefics3")
    inputs = draw_prompts("idefics3", model, (1,))
    inputs["pixel_values"][:] = 1.0
    mask = torch.ones(*inputs["pixel_values"].shape[:2], 16, 16)
    mask[..., 8:, :] = 0
    stats = answer(model, SCREEN, inputs | {"pixel_attention_mask": mask})[1]
    assert "3 of 4 visual tokens" in stats.reference  # two of four features are padding


UNSERVED = [
    (name, method)
    for name in ("llava", "qwen3_vl", "internvl")
    for method in (mmaccel.DownsamplePixels(keep=0.25), SCREEN, DivPrune(keep=0.3))
]


@pytest.mark.parametrize(("name", "method"), [*UNSERVED, ("llava", mmaccel.ToMe(keep=0.4))])
def test_calls_that_are_not_served_have_whole_images(name: str, method: Any) -> None:
    model = shared_looking(name)
    inputs = draw_screen(name, model)  # which has equal patches, too
    own = model.generate(**inputs, **GREEDY, num_beams=2)
    with mmaccel.attach(model, mmaccel.Jacobi(4), visual_tokens=method) as run:
        with pytest.warns(UserWarning, match="without the policy: beam search"):
            made = model.generate(**inputs, **GREEDY, num_beams=2)
        assert run.stats.reference == "" and run.stats.fallbacks
    assert torch.equal(made, own)


def _swapped(patch: pytest.MonkeyPatch) -> None:
    own = patches.find_targets

    def swapped(plan: Any) -> Tensor:
        turned = torch.arange(16) % 4 * 4 + torch.arange(16) // 4
        return turned[own(plan)][:, turned]

    patch.setattr(patches, "find_targets", swapped)


def _first_positions(patch: pytest.MonkeyPatch) -> None:
    own = patches.describe_kept

    def consecutive(run: Any, grids: Tensor, kept: Tensor) -> dict[str, Tensor]:
        found = own(run, grids, kept)
        whole = own(run, grids, torch.ones_like(kept))
        n = len(found["position_ids"])
        first = {key: whole[key][:n] for key in ("position_ids", "interp_indices")}
        return found | first

    patch.setattr(patches, "describe_kept", consecutive)


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


BUGS = {
    "rows and columns swapped": (_swapped, "llava"),
    "places of the first patches": (_first_positions, "qwen3_vl"),
    "images see each other": (_one_sequence, "qwen2_vl"),
    "windows see each other": (_one_sequence, "qwen2_5_vl"),
    "one pixel is compared": (_from_the_left, "internvl"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, name = BUGS[bug]
    model = shared_looking(name)
    inputs = draw_screen(name, model)
    if bug.startswith("one pixel"):  # squares that begin alike
        inputs["pixel_values"][..., ::8, ::8] = 0.0
    expected, _ = reference_answer(model, name, inputs)
    plant(monkeypatch)
    assert not torch.equal(answer(model, SCREEN, inputs)[0], expected)
