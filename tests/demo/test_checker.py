"""The checker: real images pass, every kind of wrong image fails the verdict it belongs to."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mmaccel.demo.scenes import checker
from mmaccel.demo.scenes.checker import Fit, check_images
from mmaccel.demo.scenes.data import make_scenes
from mmaccel.demo.scenes.layout import SHAPES, SceneObject, draw_scene, generator
from mmaccel.demo.scenes.render import COLOUR_RGB, draw_noise, render

_, CAPTIONS, DRAWN = make_scenes(11, range(80))
IMAGES = DRAWN.float() / 255


def test_real_images_are_right() -> None:
    scores = checker.score_images(IMAGES, CAPTIONS)
    assert scores["whole"] >= 0.97
    assert scores["background"] >= 0.99


SWAPS = {  # verdict -> words, and those that are put for them
    "background": {" grass": " snow", " sand": " water", " snow": " grass", " water": " sand"},
    "colours": {"red": "blue", "green": "purple", "yellow": "red", "white": "green"},
    "shapes": {"circle": "square", "star": "circle", "ring": "triangle", "triangle": "ring"},
    "sizes": {"small": "large", "large": "small", "little": "big"},
    "relations": {"above": "below", "left of": "right of", "inside": "above", "under": "over"},
}


@pytest.mark.parametrize("verdict", list(SWAPS))
def test_a_wrong_word_fails_its_own_verdict(verdict: str) -> None:
    tested = caught = 0
    for old, new in SWAPS[verdict].items():
        for k, caption in enumerate(CAPTIONS):
            wrong = caption.replace(old, new)
            if wrong == caption or (verdict == "colours" and new in caption):
                continue
            if tested >= 30:
                break
            tested += 1
            checked = check_images(IMAGES[k : k + 1], [wrong])[0]
            caught += not getattr(checked, verdict) and not checked.whole
    assert tested >= 15
    assert caught >= 0.97 * tested


def test_a_colour_too_many_is_wrong() -> None:
    scenes, captions, drawn = make_scenes(12, range(60))
    for k, scene in enumerate(scenes):
        if len(scene.objects) == 2 and scene.relations[0] != "inside":
            wanted = scene.objects[0]
            caption = f"a {wanted.colour} {wanted.shape}"
            assert not check_images(drawn[k : k + 1].float() / 255, [caption])[0].colours
            return
    pytest.fail("no image of two objects among sixty")


def thing(colour: str, shape: str, x: float, y: float, radius: float) -> SceneObject:
    return SceneObject(colour, shape, "large", x, y, radius, 0.0, "plain", 0.0)


def drawn_scene(ground: str, *things: SceneObject) -> torch.Tensor:
    """An image [1, 3, 64, 64] with these objects and an ordinary ground."""
    rng = generator(99, 5)
    scene = replace(draw_scene(rng), objects=things, relations=(), background=ground)
    return render([scene], [draw_noise(rng)]).float() / 255


RED = thing("red", "circle", 18, 18, 9)
BLUE = thing("blue", "square", 40, 44, 13.5)


def test_an_object_of_an_asked_colour_too_many_is_wrong() -> None:
    caption = ["a red circle above a blue square on grass"]
    assert check_images(drawn_scene("grass", RED, BLUE), caption)[0].whole
    for extra in (thing("red", "star", 50, 15, 9), thing("red", "circle", 50, 15, 8.5)):
        checked = check_images(drawn_scene("grass", RED, BLUE, extra), caption)[0]
        assert not checked.colours and not checked.whole


def test_bands_of_several_grounds_are_no_ground() -> None:
    image = drawn_scene("grass", RED, BLUE)
    image[:, :, 22:40] = drawn_scene("sand", RED, BLUE)[:, :, 22:40]
    image[:, :, 40:] = drawn_scene("night", RED, BLUE)[:, :, 40:]
    assert not check_images(image, ["a red circle above a blue square on grass"])[0].background


MALFORMED = {
    "half disc": lambda x, y: ((x - 32) ** 2 + (y - 32) ** 2 < 15**2) & (y > 30),
    "open disc": lambda x, y: (
        ((x - 32) ** 2 + (y - 32) ** 2 < 14**2) & ~((y - 32).abs() < 1.8 * (x - 32))
    ),
    "disc with a tail": lambda x, y: (
        ((x - 20) ** 2 + (y - 32) ** 2 < 13**2) | ((x > 20) & (x < 58) & ((y - 32).abs() < 2))
    ),
    "half image": lambda x, y: x > 30,
    "whole image": lambda x, y: x > -1,
    "bar": lambda x, y: ((x - 32).abs() < 15) & ((y - 32).abs() < 3),
    "cross": lambda x, y: (
        ((x - 32).abs() < 4) & ((y - 32).abs() < 14) | ((y - 32).abs() < 4) & ((x - 32).abs() < 14)
    ),
    "L": lambda x, y: (
        ((x - 25).abs() < 4) & ((y - 32).abs() < 13) | ((y - 42).abs() < 4) & ((x - 32).abs() < 12)
    ),
    "ellipse": lambda x, y: ((x - 32) / 20) ** 2 + ((y - 32) / 9) ** 2 < 1,
}


@pytest.mark.parametrize("shape", MALFORMED.values(), ids=MALFORMED)
def test_malformed_objects_pass_as_no_shape(shape: Callable[..., torch.Tensor]) -> None:
    image = drawn_scene("grass", thing("red", "circle", 1000, 1000, 9))
    y, x = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
    for channel, value in enumerate(COLOUR_RGB["red"]):
        image[0, channel][shape(x, y)] = value
    for name in SHAPES:
        assert not check_images(image, [f"a red {name} on grass"])[0].whole


@pytest.mark.parametrize(
    "change", [{"shape": "star"}, {"explained": 0.05}, {"overlap": 0.45}, {"extent": 1.3}], ids=str
)
def test_each_measure_of_a_fit_can_refuse_it(change: dict[str, Any]) -> None:
    fit = Fit("ring", 30.0, 30.0, 9.0, explained=0.8, overlap=0.8, extent=1.0)
    assert checker.is_shape(fit, "ring")
    assert not checker.is_shape(replace(fit, **change), "ring")


def test_pieces_and_cores_by_hand() -> None:
    rows = ("11000", "11011", "00011", "00011")
    mask = torch.tensor([[bit == "1" for bit in row] for row in rows]).numpy()
    piece = checker.largest_piece(mask)
    assert piece.sum() == 6 and piece[1:, 3:].all()
    assert [p.sum() for p in checker.find_pieces(mask)] == [6, 4]
    assert checker.core_size(mask) == 0
    full = torch.ones(4, 5).bool().numpy()
    assert checker.core_size(full) == 2 * 3
    assert checker.largest_piece(full & False).sum() == 0
