"""Questions about busy scenes: determinism, geometry, right answers, and nothing to be guessed."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from itertools import combinations

import pytest
import torch
from torch import Tensor

from mmaccel.demo.scenes.layout import COLOURS, SHAPES
from mmaccel.demo.scenes.render import COLOUR_RGB
from mmaccel.demo.scenes_vqa.data import list_questions, make_examples, make_questions
from mmaccel.demo.scenes_vqa.layout import (
    SIGN_HEIGHT,
    SIGN_WIDTH,
    TILE,
    BusyScene,
    draw_scene,
    stream,
)
from mmaccel.demo.scenes_vqa.questions import KINDS
from mmaccel.demo.scenes_vqa.render import FIRST_SIGN, GLYPHS
from scripts.training.vqa_answers import interval, measure_guesses

EXAMPLES = make_examples(7, range(60), per_kind=4)
SCENES = [draw_scene(stream(8, k, 0)) for k in range(300)]


def test_an_example_depends_on_seed_and_index_alone() -> None:
    some, alone = make_examples(5, [3, 9, 4], 2), make_examples(5, [9], 2)
    assert some.scenes[1] == alone.scenes[0] and some.questions[1] == alone.questions[0]
    assert torch.equal(some.images[1], alone.images[0])
    assert torch.equal(some.maps[1], alone.maps[0])
    assert make_questions(5, [9], 2) == alone.questions
    assert torch.equal(make_examples(5, [9], 0).images, alone.images)
    assert not torch.equal(make_examples(6, [9], 0).images, alone.images)


def test_nothing_overlaps_and_no_noun_is_ambiguous() -> None:
    for scene in SCENES:
        assert 3 <= len(scene.things) <= 7 and 1 <= len(scene.signs) <= 2
        assert len({(t.colour, t.shape) for t in scene.things}) == len(scene.things)
        assert len({s.colour for s in scene.signs}) == len(scene.signs)
        for a, b in combinations(scene.things, 2):
            assert math.dist((a.x, a.y), (b.x, b.y)) > a.radius + b.radius + 2
        for sign in scene.signs:
            assert sign.x // TILE == (sign.x + SIGN_WIDTH - 1) // TILE
            assert sign.y // TILE == (sign.y + SIGN_HEIGHT - 1) // TILE
            for thing in scene.things:
                x = min(max(thing.x, sign.x), sign.x + SIGN_WIDTH)
                y = min(max(thing.y, sign.y), sign.y + SIGN_HEIGHT)
                assert math.dist((x, y), (thing.x, thing.y)) > thing.radius + 2


def right_answer(scene: BusyScene, text: str) -> str:
    """Reads a question and looks for its answer; shares no code with what asks."""
    words = re.findall(r"[a-z]+", text)
    colours = [w for w in words if w in COLOURS]
    shapes = [w.removesuffix("s") for w in words if w.removesuffix("s") in SHAPES]
    size = next((w for w in words if w in ("small", "large")), None)
    if "sign" in words:
        (number,) = [s.number for s in scene.signs if s.colour == colours[0]]
        return str(number)
    if "or" in words:
        size = None
    fitting = [
        t
        for t in scene.things
        if (not colours or t.colour == colours[0])
        and (not shapes or t.shape == shapes[0])
        and size in (None, t.size)
    ]
    if words[:2] == ["how", "many"]:
        return str(len(fitting))
    if words[:2] == ["is", "there"]:
        return "yes" if fitting else "no"
    (thing,) = fitting
    turn = {"left": (-1, 0), "right": (1, 0), "above": (0, -1), "below": (0, 1)}
    way = next((turn[w] for w in words if w in turn), (0, 0))
    if "or" in words and words[-1] in turn:
        is_first = (thing.x - 40) * way[0] + (thing.y - 40) * way[1] > 0
        return words[-3] if is_first else words[-1]
    if words[0] == "which":
        found = []
        for other in scene.things:
            dx, dy = other.x - thing.x, other.y - thing.y
            along, across = dx * way[0] + dy * way[1], abs(dx * way[1] + dy * way[0])
            if along > 0 and across <= along:
                found.append((math.hypot(dx, dy), f"{other.colour} {other.shape}"))
        return min(found)[1]
    if len(shapes) == 2:
        (other,) = [t for t in scene.things if (t.colour, t.shape) == (colours[1], shapes[1])]
        along = (thing.x - other.x) * way[0] + (thing.y - other.y) * way[1]
        return "yes" if along > 0 else "no"
    if "dot" in words:
        return str(thing.dot)
    return {"colour": thing.colour, "shape": thing.shape, "is": thing.size}[
        words[0] if words[0] == "is" else words[1]
    ]


def test_answers_are_right() -> None:
    seen = Counter()
    for scene, questions in zip(EXAMPLES.scenes, EXAMPLES.questions, strict=True):
        for question in questions:
            seen[question.kind] += 1
            assert right_answer(scene, question.text) == question.answer, question
    assert set(seen) == set(KINDS) and min(seen.values()) > 40


def test_what_does_not_exist_almost_does() -> None:
    for scene, questions in zip(EXAMPLES.scenes, EXAMPLES.questions, strict=True):
        for question in questions:
            if question.kind == "exists" and question.answer == "no":
                *_, colour, shape = question.text.rstrip("?").split()
                assert colour in {t.colour for t in scene.things}
                assert shape in {t.shape for t in scene.things}


def nearest_colour(pixels: Tensor) -> str:
    """The colour whose hue is nearest to the mean of pixels [3, N]."""
    mean = pixels.float().mean(1)
    spread = {
        name: torch.cosine_similarity(mean, torch.tensor(rgb), dim=0)
        for name, rgb in COLOUR_RGB.items()
    }
    return max(spread, key=lambda name: spread[name])


def test_pixels_show_what_the_description_says() -> None:
    for scene, image, shown in zip(EXAMPLES.scenes, EXAMPLES.images, EXAMPLES.maps, strict=True):
        assert set(shown.unique().tolist()) == {
            0,
            *range(1, len(scene.things) + 1),
            *range(FIRST_SIGN, FIRST_SIGN + len(scene.signs)),
        }
        for k, thing in enumerate(scene.things):
            where = shown == k + 1
            ys, xs = where.nonzero().float().T
            assert (xs.mean() + 0.5 - thing.x).abs() < 1 and (ys.mean() + 0.5 - thing.y).abs() < 3
            bare = where.clone()
            if thing.dot is not None:
                x, y = int(thing.dot_x), int(thing.dot_y)
                assert nearest_colour(image[:, y : y + 1, x]) == thing.dot
                bare[y - 4 : y + 5, x - 4 : x + 5] = False
            assert nearest_colour(image[:, bare]) == thing.colour
            area = where.sum() / thing.radius**2
            assert 0.8 < area < 3.8


def read_sign(image: Tensor, x: int, y: int) -> str:
    """The two digits whose ink fits the pixels of a plate best."""
    plate = image[:, y : y + SIGN_HEIGHT, x : x + SIGN_WIDTH].float()
    ink = (plate.amin(0) > 200).float()
    glyphs = torch.from_numpy(GLYPHS)
    digits = (ink[2:9, 2:7], ink[2:9, 8:13])
    return "".join(str(int((glyphs - d).abs().sum((1, 2)).argmin())) for d in digits)


def test_signs_can_be_read_and_not_at_half_size() -> None:
    for scene, image in zip(EXAMPLES.scenes, EXAMPLES.images, strict=True):
        for sign in scene.signs:
            assert read_sign(image, sign.x, sign.y) == str(sign.number)
    assert len({tuple(g.ravel()) for g in GLYPHS}) == 10


def test_little_can_be_guessed_without_the_image() -> None:
    guesses = measure_guesses(scenes=2000, per_kind=300)
    shares = {kind: row["right"] for kind, row in guesses.items()}
    limits = {"colour": 0.3, "shape": 0.4, "size": 0.65, "count": 0.55, "relation": 0.6}
    limits |= {"neighbour": 0.15, "exists": 0.6, "sign": 0.06, "dot": 0.3, "side": 0.6, "all": 0.38}
    assert {k: v for k, v in shares.items() if v > limits[k]} == {}


def test_yes_and_no_are_balanced() -> None:
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for row in make_questions(9, range(400), per_kind=1):
        for question in row:
            answers[question.kind][question.answer] += 1
    for kind, pair in (
        ("relation", ("yes", "no")),
        ("exists", ("yes", "no")),
        ("size", ("small", "large")),
        ("side", ("left", "right")),
    ):
        low, high = interval(answers[kind][pair[0]], sum(answers[kind][answer] for answer in pair))
        assert low < 0.55 and high > 0.45


@pytest.mark.parametrize("per_kind", [3])
def test_evaluation_has_as_many_questions_of_each_kind(per_kind: int) -> None:
    asked = list(list_questions(per_kind))
    assert Counter(q.kind for _, q in asked) == dict.fromkeys(KINDS, per_kind)
    assert asked[0][0].shape == (3, 80, 80)
