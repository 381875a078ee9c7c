"""The picture of kept tokens: patches where the encoder had them, dropped ones dimmed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mmaccel
from mmaccel import ImageToText, UnsupportedModelError
from mmaccel.demo.scenes_vqa.processor import make_processor
from mmaccel.pipelines.image_to_text.image_tokens import ImageTokens
from mmaccel.pipelines.image_to_text.kept_picture import draw_kept
from mmaccel.pipelines.image_to_text.views import find_image_tokens
from scripts.training.vqa_tower import split_views
from tests.fixtures.tiny_vlms import build_vlm, draw_images, draw_prompts
from tests.fixtures.tiny_vqa import QUESTION, build_vqa, scene
from tests.vision_language.runs import reduces

MARGIN, GAP = 24, 16


def ask(image: Image.Image, **options: Any) -> ImageTokens:
    method = mmaccel.RandomTokens(**(options or {"keep": 0.5}))
    pipe = ImageToText(build_vqa(), make_processor(), visual_tokens=method)
    return pipe(image, QUESTION, max_new_tokens=1)[0].images[0]


def patches(picture: Image.Image, left: int, top: int, n: int, cell: int) -> torch.Tensor:
    """`[n, n, cell, cell, 3]` of a square part of a picture."""
    part = torch.from_numpy(np.asarray(picture).copy())
    part = part[top : top + n * cell, left : left + n * cell]
    return part.unflatten(0, (n, cell)).unflatten(2, (n, cell)).transpose(1, 2)


@reduces
def test_pixels_are_the_processors_views() -> None:
    tokens = ask(scene())
    image = torch.from_numpy(np.asarray(scene()).copy()).permute(2, 0, 1)
    wanted = (split_views(image[None])[0] * 0.5 + 0.5) * 255
    assert tokens.pixels is not None and tokens.tile_grid == (2, 2)
    difference = tokens.pixels.permute(0, 3, 1, 2).float() - wanted
    assert float(difference.abs().max()) <= 1


@reduces
def test_kept_patches_are_clear_and_dropped_ones_grey() -> None:
    tokens = ask(scene())
    picture = draw_kept([tokens])
    assert picture.size == (2 * MARGIN + 480 + GAP + 480, 2 * MARGIN + 480)
    assert tokens.pixels is not None
    overview = patches(picture, MARGIN, MARGIN, 10, 48)
    tiles = patches(picture, MARGIN + 480 + GAP, MARGIN, 20, 24)
    for k in range(tokens.n_all):
        view, row, column = (int(v[k]) for v in (tokens.view, tokens.row, tokens.column))
        if row < 0:
            continue  # ends a row of the tiles
        own = tokens.pixels[view, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        if view == 0:
            drawn = overview[row, column]
        else:
            down, across = divmod(view - 1, 2)
            drawn = tiles[10 * down + row, 10 * across + column]
        shown = drawn[:: drawn.shape[0] // 4, :: drawn.shape[1] // 4]
        if tokens.kept[k]:
            assert torch.equal(shown, own)
        else:
            assert bool((shown == shown[..., :1]).all())
            veil = shown.float() - 0.25 * own.float().mean(-1, keepdim=True)
            assert float((veil - veil.mean()).abs().max()) <= 1
    assert 0 < tokens.n_kept < tokens.n_all


@reduces
def test_padding_of_a_wide_image_is_no_patch() -> None:
    image = Image.new("RGB", (100, 40), (250, 120, 0))  # two tiles, with bars above and below
    tokens = ask(image, keep=1.0)
    assert tokens.tile_grid == (1, 2) and tokens.pixels is not None and len(tokens.pixels) == 3
    picture = np.asarray(draw_kept([tokens]))
    assert picture.shape[:2] == (2 * MARGIN + 480, 2 * MARGIN + 480 + GAP + 480)
    right = picture[MARGIN : MARGIN + 240, MARGIN + 480 + GAP : -MARGIN]
    assert (right[0] == 250).all() and (right[-1] == 250).all()  # paper
    assert (np.abs(right[120].astype(int) - (250, 120, 0)) <= 1).all()


@reduces
def test_images_of_different_shapes_have_views_of_their_own() -> None:
    wide = Image.new("RGB", (100, 40), (250, 120, 0))
    method = mmaccel.RandomTokens(keep=0.5)
    pipe = ImageToText(build_vqa(), make_processor(), visual_tokens=method)
    both = pipe([wide, scene()], QUESTION, max_new_tokens=1)[0].images
    for tokens, alone in zip(both, (ask(wide), ask(scene())), strict=True):
        assert tokens.pixels is not None and alone.pixels is not None
        assert torch.equal(tokens.pixels, alone.pixels) and tokens.tile_grid == alone.tile_grid
    assert [len(tokens.view.unique()) for tokens in both] == [3, 5]


@reduces
def test_images_are_drawn_one_below_the_other() -> None:
    tokens = ask(scene())
    one, two = draw_kept([tokens]), np.asarray(draw_kept([tokens, tokens]))
    shown = np.asarray(one)[MARGIN:-MARGIN]
    assert (two[MARGIN : MARGIN + 480] == shown).all()
    assert (two[MARGIN + 480 + GAP : -MARGIN] == shown).all()


@reduces
def test_one_view_alone_and_places_that_are_unknown() -> None:
    places = torch.arange(16)
    pixels = torch.full((1, 16, 16, 3), 200, dtype=torch.uint8)
    kept = places % 3 == 0
    tokens = ImageTokens(kept, places * 0, places // 4, places % 4, pixels)
    drawn = patches(draw_kept([tokens]), MARGIN, MARGIN, 4, 120)
    assert torch.equal((drawn == 200).flatten(2).all(2).flatten(), kept)
    unknown = ImageTokens(kept, places * 0, places * 0 - 1, places * 0 - 1)
    with pytest.raises(UnsupportedModelError, match="places in the image are known"):
        draw_kept([unknown])


@pytest.mark.slow
@reduces
@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "gemma3"])
def test_views_of_other_families(name: str) -> None:
    """A grid of patches for models that read an image as one, none where places are unknown."""
    model = build_vlm(name)
    drawn = draw_images(name, model, [1])
    inputs = draw_prompts(name, model, (1,))
    with mmaccel.attach(model, "jacobi", visual_tokens=mmaccel.RandomTokens(keep=0.5)) as run:
        model.generate(**inputs, max_new_tokens=1, do_sample=False)
    part = type("Part", (), {"image_mean": [0.5] * 3, "image_std": [0.5] * 3})()
    processor = type("Processor", (), {"image_processor": part})()
    (tokens,) = find_image_tokens(model, processor, run.kept_tokens, inputs, [[scene()]])[0]
    assert tokens.n_all == drawn.counts[0]
    if name in ("llava", "qwen2_vl"):
        assert tokens.pixels is not None and tokens.pixels.shape == (1, 16, 16, 3)
        assert draw_kept([tokens]).size == (2 * MARGIN + 480, 2 * MARGIN + 480)
    else:
        assert tokens.pixels is None
