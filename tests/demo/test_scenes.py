"""Scenes: determinism, geometry of the relations, captions that read back, words and their ids."""

import numpy as np
import pytest
import torch

from mmaccel.demo.scenes.caption import read_caption
from mmaccel.demo.scenes.data import CaptionWords, make_captions, make_scenes
from mmaccel.demo.scenes.layout import CANVAS, SHAPES, draw_scene, generator
from mmaccel.demo.scenes.render import shape_depth

WORDS = CaptionWords(n_image_tokens=10, words=("a", "red", "circle"), max_words=4)
SCENES = [draw_scene(generator(7, k)) for k in range(400)]


def test_an_image_depends_on_seed_and_index_alone() -> None:
    _, captions, images = make_scenes(5, [3, 9, 4])
    _, alone_captions, alone = make_scenes(5, [9])
    assert captions[1] == alone_captions[0]
    assert torch.equal(images[1], alone[0])
    assert images.dtype == torch.uint8 and images.shape == (3, 3, 64, 64)
    assert make_captions(5, [3, 9, 4]) == captions
    assert not torch.equal(make_scenes(6, [9])[2][0], alone[0])


def test_relations_hold() -> None:
    seen = set()
    for scene in SCENES:
        first = scene.objects[0]
        for relation, other in zip(scene.relations, scene.objects[1:], strict=True):
            seen.add(relation)
            right, down = other.x - first.x, other.y - first.y
            apart = first.radius + other.radius
            if relation == "inside":
                assert max(abs(right), abs(down)) < 2 and first.radius < other.radius / 1.8
            elif relation in ("above", "below"):
                assert (down if relation == "above" else -down) >= apart and abs(right) < abs(down)
            else:
                assert (right if relation == "left of" else -right) >= apart and abs(down) < abs(
                    right
                )
    assert seen == {"above", "below", "left of", "right of", "inside"}


def test_objects_stay_on_the_canvas_and_colours_differ() -> None:
    for scene in SCENES:
        assert len({o.colour for o in scene.objects}) == len(scene.objects)
        for thing in scene.objects:
            assert (
                thing.radius - 1 <= min(thing.x, thing.y)
                and max(thing.x, thing.y) <= CANVAS - thing.radius + 1
            )
            assert thing.radius < 10 if thing.size == "small" else thing.radius > 12


def test_captions_read_back_to_their_scene() -> None:
    scenes, captions, _ = make_scenes(8, range(300))
    for scene, caption in zip(scenes, captions, strict=True):
        reading = read_caption(caption)
        assert reading.relations == scene.relations
        assert reading.background in (None, scene.background)
        for wanted, thing in zip(reading.objects, scene.objects, strict=True):
            assert (wanted.colour, wanted.shape) == (thing.colour, thing.shape)
            assert wanted.size in (None, thing.size)
    unsaid = sum(read_caption(c).background is None for c in captions)
    assert 3 <= unsaid <= 35  # 5 % of 300: mean 15, five standard deviations


def test_captions_by_hand() -> None:
    reading = read_caption(
        "At night, the big red star to the left of a ring-less blue ring".replace("ring-less ", "")
    )
    assert reading.background == "night"
    assert [(o.colour, o.shape, o.size) for o in reading.objects] == [
        ("red", "star", "large"),
        ("blue", "ring", None),
    ]
    assert reading.relations == ("left of",)


@pytest.mark.parametrize(
    ("shape", "area"),
    [
        ("circle", np.pi),
        ("square", 4 * 0.88**2),
        ("triangle", 3 * np.sqrt(3) * 0.56**2),
        ("star", 5 * 1.18 * 0.46 * np.sin(np.pi / 5)),
    ],
)
def test_areas_of_the_shapes(shape: str, area: float) -> None:
    """Area by counting fine grid points against the closed form, in squared radii."""
    axis = torch.linspace(-1.5, 1.5, 601)
    inside = shape_depth(shape, axis[None, None, :], axis[None, :, None], 1.0, 0.0) > 0
    assert float(inside.float().mean()) * 9 == pytest.approx(area, rel=0.01)


def test_every_shape_points_up() -> None:
    """Triangle and star have their tip at the top: shape far above the centre, none below."""
    for shape in ("triangle", "star"):
        up = shape_depth(shape, torch.zeros(1, 1, 1), torch.full((1, 1, 1), -0.88), 1.0, 0.0)
        down = shape_depth(shape, torch.zeros(1, 1, 1), torch.full((1, 1, 1), 0.88), 1.0, 0.0)
        assert float(up) > 0 > float(down)
    assert set(SHAPES) == {"circle", "square", "triangle", "star", "ring"}


def test_ids_come_after_the_image_tokens() -> None:
    assert (WORDS.bos, WORDS.boi, WORDS.pad, WORDS.vocab_size) == (10, 11, 12, 16)
    assert WORDS.encode("a red circle") == [10, 13, 14, 15, 11]
    assert WORDS.unconditional() == [10, 11]


def test_capitals_and_punctuation_do_not_matter() -> None:
    assert WORDS.encode("  A, red-CIRCLE. ") == WORDS.encode("a red circle")


def test_decode_skips_what_is_no_word() -> None:
    assert WORDS.decode([10, 13, 14, 15, 11, 3, 9, 12]) == "a red circle"


def test_the_list_has_every_word_once() -> None:
    words = CaptionWords(1000).words
    assert len(set(words)) == len(words)
    wanted = (
        "red green blue yellow purple orange white circle square triangle star ring small large "
        "above below left right of inside on grass sand water snow at night"
    )
    assert set(wanted.split()) <= set(words)
