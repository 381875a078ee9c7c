"""Busy scenes, image `index` of `seed`: its picture, map and questions. Training, validation and
evaluation draw from different seeds, so they share no image.

A busy scene has three to seven objects, no two of the same colour and shape, one or two signs with
a number of two digits, and strokes of clutter. Large objects may carry a dot of another colour. A
sign lies within one tile of the image. Neither objects nor signs overlap.

Questions are of ten kinds. An answer is one word, two (a colour and a shape) or a number, drawn
before a question that has it, so that answers are balanced. What is false is almost true: a `red
star` is asked for where something red and a star are, but no red star.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmaccel.demo.scenes.layout import (
    COLOURS,
    HORIZONTAL,
    SHAPES,
    SIZES,
    VERTICAL,
    Point,
    Scene,
    Thing,
    draw_ground,
    draw_look,
    generator,
)
from mmaccel.demo.scenes.render import COLOUR_RGB, Noise, Picture, draw_noise

CANVAS = 80
TILE = 40
SIGN_COLOURS = ("red", "green", "blue", "purple")
SIGN_WIDTH = 15
SIGN_HEIGHT = 11

_RADIUS = {"small": (4.6, 5.4), "large": (8.6, 10.0)}
_REACH = {"circle": 1.0, "square": 1.3, "triangle": 1.2, "star": 1.2, "ring": 1.0}
_GAP = 2.5
_MARGIN = 1.5
_MOST_LARGE = 3
_HAS_DOT = ("circle", "square", "triangle")  # large shapes with room for one


@dataclass(frozen=True)
class Sign:
    """A plate with a number; `x`, `y` are its upper left pixel."""

    colour: str
    number: int
    x: int
    y: int


@dataclass(frozen=True)
class Stroke:
    """A piece of clutter: a segment from (x, y), `light` times as bright as the ground."""

    x: float
    y: float
    dx: float
    dy: float
    light: float


@dataclass(frozen=True, kw_only=True)
class BusyScene(Scene):
    """One scene; strokes lie below the objects."""

    signs: tuple[Sign, ...]
    strokes: tuple[Stroke, ...]


def draw_scene(rng: np.random.Generator) -> BusyScene:
    n_objects = int(rng.integers(3, 8))
    pairs = rng.permutation(len(COLOURS) * len(SHAPES))[:n_objects]
    nouns = [(COLOURS[p // len(SHAPES)], SHAPES[p % len(SHAPES)]) for p in pairs]
    large = rng.random(n_objects) < 0.5
    large[np.flatnonzero(large)[_MOST_LARGE:]] = False
    sizes = ["large" if large[k] else "small" for k in rng.permutation(n_objects)]
    radii = [float(rng.uniform(*_RADIUS[size])) for size in sizes]
    reaches = [r * _REACH[shape] for r, (_, shape) in zip(radii, nouns, strict=True)]
    n_signs = int(rng.integers(1, 3))
    corners, places = _draw_places(rng, n_signs, reaches)
    colours = [SIGN_COLOURS[c] for c in rng.permutation(len(SIGN_COLOURS))[:n_signs]]
    return BusyScene(
        signs=tuple(
            Sign(colour, int(rng.integers(10, 100)), x, y)
            for colour, (x, y) in zip(colours, corners, strict=True)
        ),
        objects=tuple(
            _draw_thing(rng, *noun, size, radius, place)
            for noun, size, radius, place in zip(nouns, sizes, radii, places, strict=True)
        ),
        **draw_ground(rng, relief=(0.5, 1.1), grain=(0.008, 0.020)),
        strokes=tuple(_draw_stroke(rng) for _ in range(int(rng.integers(3, 9)))),
    )


def _draw_thing(
    rng: np.random.Generator, colour: str, shape: str, size: str, radius: float, place: Point
) -> Thing:
    dot = str(rng.choice([c for c in COLOURS if c != colour]))
    turn = float(rng.uniform(0, math.tau))
    away = float(rng.uniform(0, 0.22)) * radius
    has_dot = size == "large" and shape in _HAS_DOT and rng.random() < 0.75
    lower = 0.18 * radius if shape == "triangle" else 0
    return Thing(
        colour,
        shape,
        (place,),
        radius,
        size=size,
        dot=dot if has_dot else None,
        dot_x=place[0] + away * math.cos(turn),
        dot_y=place[1] + away * math.sin(turn) + lower,
        **draw_look(rng),
    )


def _draw_stroke(rng: np.random.Generator) -> Stroke:
    turn = float(rng.uniform(0, math.tau))
    length = float(rng.uniform(3, 8))
    x, y = rng.uniform(2, CANVAS - 2, 2).tolist()
    light = float(rng.choice((0.55, 1.5)))
    return Stroke(x, y, length * math.cos(turn), length * math.sin(turn), light)


def _draw_places(
    rng: np.random.Generator, n_signs: int, reaches: list[float]
) -> tuple[list[tuple[int, int]], list[Point]]:
    """Corners of signs and centres of objects, redrawn until all stand apart."""
    while True:
        corners = [_draw_corner(rng) for _ in range(n_signs)]
        dx, dy = (abs(a - b) for a, b in zip(corners[0], corners[-1], strict=True))
        if n_signs == 2 and dx <= SIGN_WIDTH + 2 and dy <= SIGN_HEIGHT + 2:
            continue
        centres = _draw_centres(rng, corners, reaches)
        if centres is not None:
            return corners, centres


def _draw_corner(rng: np.random.Generator) -> tuple[int, int]:
    column, row = (int(v) for v in rng.integers(0, CANVAS // TILE, 2))
    x = int(rng.integers(1, TILE - SIGN_WIDTH))
    y = int(rng.integers(1, TILE - SIGN_HEIGHT))
    return column * TILE + x, row * TILE + y


def _draw_centres(
    rng: np.random.Generator, corners: list[tuple[int, int]], reaches: list[float]
) -> list[Point] | None:
    """Centres, the widest object's first; None where one found no room."""
    centres: dict[int, Point] = {}
    for k in sorted(range(len(reaches)), key=lambda k: -reaches[k]):
        reach = reaches[k]
        low = _MARGIN + reach
        for x, y in rng.uniform(low, CANVAS - low, (40, 2)).tolist():
            is_free = all(_gap(x, y, corner) >= reach + _GAP for corner in corners)
            for other, centre in centres.items():
                is_free &= math.dist((x, y), centre) >= reach + reaches[other] + _GAP
            if is_free:
                centres[k] = (x, y)
                break
        else:
            return None
    return [centres[k] for k in range(len(reaches))]


def _gap(x: float, y: float, corner: tuple[int, int]) -> float:
    """How far a point lies from a sign."""
    left, top = corner
    dx = max(left - x, 0.0, x - (left + SIGN_WIDTH))
    dy = max(top - y, 0.0, y - (top + SIGN_HEIGHT))
    return math.hypot(dx, dy)


DOT_RADIUS = 2.2
FIRST_SIGN = 8  # in the map: 0 is ground, 1..7 the objects, then the signs
_DIGITS = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
GLYPHS = np.array([[list(map(int, row)) for row in d.split()] for d in _DIGITS], dtype=np.float32)


def render(scenes: Sequence[BusyScene], noises: Sequence[Noise]) -> tuple[Tensor, Tensor]:
    """Draws B scenes: images [B, 3, 80, 80] uint8, and maps [B, 80, 80] uint8 of what each pixel
    shows: 0 the ground, k + 1 object k, `FIRST_SIGN` + k sign k.
    """
    picture = Picture(scenes, noises)
    images = picture.frames[:, 0]
    for scene, image in zip(scenes, images, strict=True):
        for stroke in scene.strokes:
            _paint_stroke(stroke, image)
    shown = torch.zeros(len(scenes), CANVAS, CANVAS, dtype=torch.uint8)
    for slot in range(max(len(scene.objects) for scene in scenes)):
        painted, cover = picture.paint(slot)
        shown[painted] = shown[painted].masked_fill(cover >= 0.5, slot + 1)
    for scene, image, named in zip(scenes, images, shown, strict=True):
        for thing in scene.objects:
            _paint_dot(thing, image)
        for k, sign in enumerate(scene.signs):
            rows, columns = _paint_sign(sign, image)
            named[rows, columns] = FIRST_SIGN + k
    return picture.develop()[:, 0], shown


def _window(x: float, y: float, reach: float) -> tuple[slice, slice, Tensor, Tensor]:
    """Rows and columns within `reach` of a point, and their pixels' distances from it."""
    left, top = (max(int(v - reach), 0) for v in (x, y))
    right, bottom = (min(int(v + reach) + 1, CANVAS) for v in (x, y))
    dx = torch.arange(left, right) + 0.5 - x
    dy = torch.arange(top, bottom) + 0.5 - y
    return slice(top, bottom), slice(left, right), dx[None, :], dy[:, None]


def _paint_stroke(stroke: Stroke, image: Tensor) -> None:
    rows, columns, dx, dy = _window(stroke.x + stroke.dx / 2, stroke.y + stroke.dy / 2, 6)
    length = stroke.dx**2 + stroke.dy**2
    along = ((dx * stroke.dx + dy * stroke.dy) / length).clamp(-0.5, 0.5)
    far = ((dx - along * stroke.dx) ** 2 + (dy - along * stroke.dy) ** 2).sqrt()
    cover = (1.2 - far).clamp(0, 1)
    image[:, rows, columns] *= 1 + cover * (stroke.light - 1)


def _paint_dot(thing: Thing, image: Tensor) -> None:
    if thing.dot is None:
        return
    rows, columns, dx, dy = _window(thing.dot_x, thing.dot_y, DOT_RADIUS + 2)
    depth = DOT_RADIUS - (dx**2 + dy**2).sqrt()
    rim = (depth + 1.5).clamp(0, 1)  # a dark line sets the dot apart
    cover = (depth + 0.5).clamp(0, 1)
    colour = torch.tensor(COLOUR_RGB[thing.dot], dtype=torch.float32)[:, None, None]
    patch = image[:, rows, columns] * (1 - 0.6 * rim)
    image[:, rows, columns] = patch * (1 - cover) + colour * cover


def _paint_sign(sign: Sign, image: Tensor) -> tuple[slice, slice]:
    """The rows and columns of the sign."""
    rows = slice(sign.y, sign.y + SIGN_HEIGHT)
    columns = slice(sign.x, sign.x + SIGN_WIDTH)
    ink = torch.zeros(SIGN_HEIGHT, SIGN_WIDTH, dtype=torch.float32)
    for place, digit in enumerate(divmod(sign.number, 10)):
        ink[2:9, 2 + 6 * place : 7 + 6 * place] = torch.from_numpy(GLYPHS[digit])
    plate = 0.75 * torch.tensor(COLOUR_RGB[sign.colour], dtype=torch.float32)[:, None, None]
    image[:, rows, columns] = plate * (1 - ink) + 0.97 * ink
    return rows, columns


DIRECTIONS = (*HORIZONTAL, *VERTICAL)
_CLEAR = 5.0  # pixels by which a relation must hold
_NEARER = 5.0  # pixels by which the nearest object must be nearer than the next

Answers = dict[str, str]  # question -> its one right answer


@dataclass(frozen=True)
class Question:
    """A question and its one right answer."""

    kind: str
    text: str
    answer: str


def ask(
    rng: np.random.Generator, scene: BusyScene, per_kind: int | Mapping[str, int] = 1
) -> list[Question]:
    """Questions, no two alike, at most `per_kind` of each kind, or a number a kind."""
    by_text: dict[str, Question] = {}
    for kind, list_answers in KINDS.items():
        by_answer: dict[str, list[str]] = {}
        most = per_kind if isinstance(per_kind, int) else per_kind[kind]
        for text, answer in (list_answers(scene) if most else {}).items():
            by_answer.setdefault(answer, []).append(text)
        answers = list(by_answer)
        for _ in range(most if answers else 0):  # each answer that occurs is equally likely
            answer = answers[rng.integers(len(answers))]
            text = by_answer[answer][rng.integers(len(by_answer[answer]))]
            by_text.setdefault(text, Question(kind, text, answer))
    questions = list(by_text.values())
    return [questions[k] for k in rng.permutation(len(questions))]


def _looks(scene: BusyScene, asked: str, known: str, text: str) -> Answers:
    """Of objects that are the only ones of a colour or shape, or of it and a size."""
    answers = {}
    for thing in scene.objects:
        noun = {known: getattr(thing, known)}
        if _number(scene, **noun) == 1:
            answers[text.format(noun[known])] = str(getattr(thing, asked))
        elif _number(scene, size=thing.size, **noun) == 1:
            answers[text.format(f"{thing.size} {noun[known]}")] = str(getattr(thing, asked))
    return answers


def _counts(scene: BusyScene) -> Answers:
    counts = {"objects": len(scene.objects)}
    counts |= {f"{size} objects": _number(scene, size=size) for size in SIZES}
    counts |= {f"{colour} objects": _number(scene, colour=colour) for colour in COLOURS}
    counts |= {f"{shape}s": _number(scene, shape=shape) for shape in SHAPES}
    return {f"how many {what} are there?": str(n) for what, n in counts.items()}


def _sides(scene: BusyScene) -> Answers:
    answers = {}
    for thing in scene.objects:
        for low, high, way in (("left", "right", thing.x), ("above", "below", thing.y)):
            if abs(way - CANVAS / 2) >= _CLEAR:  # of the middle of the image
                text = f"is the {_noun(thing)} {low} or {high}?"
                answers[text] = low if way < CANVAS / 2 else high
    return answers


def _relations(scene: BusyScene) -> Answers:
    answers = {}
    for a in scene.objects:
        for b in scene.objects:
            for direction in DIRECTIONS:
                along, _ = _leads(b, a, direction)
                if abs(along) >= _CLEAR:
                    text = f"is the {_noun(a)} {direction} the {_noun(b)}?"
                    answers[text] = "yes" if along > 0 else "no"
    return answers


def _neighbours(scene: BusyScene) -> Answers:
    answers = {}
    for thing in scene.objects:
        for direction in DIRECTIONS:
            nearest = _find_nearest(scene, thing, direction)
            if nearest is not None:
                answers[f"which object is {direction} the {_noun(thing)}?"] = _noun(nearest)
    return answers


def _existences(scene: BusyScene) -> Answers:
    here = {_noun(thing) for thing in scene.objects}
    answers = {}
    for colour in dict.fromkeys(thing.colour for thing in scene.objects):
        article = "an" if colour == "orange" else "a"
        for shape in dict.fromkeys(thing.shape for thing in scene.objects):
            is_here = f"{colour} {shape}" in here
            answers[f"is there {article} {colour} {shape}?"] = "yes" if is_here else "no"
    return answers


KINDS: dict[str, Callable[[BusyScene], Answers]] = {
    "colour": lambda scene: _looks(scene, "colour", "shape", "what colour is the {}?"),
    "shape": lambda scene: _looks(scene, "shape", "colour", "what shape is the {} object?"),
    "size": lambda scene: {f"is the {_noun(t)} small or large?": t.size for t in scene.objects},
    "count": _counts,
    "relation": _relations,
    "neighbour": _neighbours,
    "exists": _existences,
    "sign": lambda scene: {
        f"what number is on the {s.colour} sign?": str(s.number) for s in scene.signs
    },
    "dot": lambda scene: {
        f"what colour is the dot on the {_noun(t)}?": t.dot for t in scene.objects if t.dot
    },
    "side": _sides,
}


def _find_nearest(scene: BusyScene, thing: Thing, direction: str) -> Thing | None:
    """The nearest object in a direction, at least as far along as across, from a thing; None where
    one that is nearly so, and not clearly farther away, makes it unclear.
    """
    inside, doubtful = [], []
    for other in scene.objects:
        along, across = _leads(thing, other, direction)
        far = math.hypot(along, across)
        if along > 0 and across <= 0.9 * along:
            inside.append((far, other))
        elif along > 0 and across <= 1.3 * along:
            doubtful.append(far)
    if not inside:
        return None
    inside.sort(key=lambda pair: pair[0])
    nearest, other = inside[0]
    rivals = doubtful + [far for far, _ in inside[1:]]
    return other if all(far >= nearest + _NEARER for far in rivals) else None


def _leads(start: Thing, end: Thing, direction: str) -> tuple[float, float]:
    """How far `end` lies from `start` along a direction and across it, pixels."""
    dx = end.x - start.x
    dy = end.y - start.y
    along = {"left of": -dx, "right of": dx, "above": -dy, "below": dy}[direction]
    return along, abs(dy if direction in HORIZONTAL else dx)


def _noun(thing: Thing) -> str:
    return f"{thing.colour} {thing.shape}"


def _number(scene: BusyScene, **looks: str) -> int:
    return sum(all(getattr(t, k) == v for k, v in looks.items()) for t in scene.objects)


TRAIN_SEED, VALIDATION_SEED, EVALUATION_SEED = 21, 22, 23
_SCENE, _NOISE, _QUESTIONS = range(3)  # generators of an image
_BATCH = 16


class Examples(NamedTuple):
    """B images with questions."""

    scenes: list[BusyScene]
    images: Tensor  # [B, 3, 80, 80] uint8
    maps: Tensor  # [B, 80, 80] uint8, what each pixel shows, as `render` says
    questions: list[list[Question]]  # of each image


def make_examples(
    seed: int, indices: Iterable[int], per_kind: int | Mapping[str, int] = 1
) -> Examples:
    """Images with at most `per_kind` questions of each kind, or a number a kind; 0 asks nothing."""
    indices = list(indices)
    scenes = [draw_scene(generator(seed, k, _SCENE)) for k in indices]
    noises = [draw_noise(generator(seed, k, _NOISE), side=CANVAS) for k in indices]
    return Examples(scenes, *render(scenes, noises), make_questions(seed, indices, per_kind))


def make_questions(
    seed: int, indices: Iterable[int], per_kind: int | Mapping[str, int] = 1
) -> list[list[Question]]:
    """The questions alone (the same as `make_examples` gives, without drawing)."""
    return [
        ask(generator(seed, k, _QUESTIONS), draw_scene(generator(seed, k, _SCENE)), per_kind)
        for k in indices
    ]


def list_questions(per_kind: int, seed: int = EVALUATION_SEED) -> Iterator[tuple[Tensor, Question]]:
    """Images [3, 80, 80] uint8 with one question each, `per_kind` of each kind, scene by scene."""
    n_missing = dict.fromkeys(KINDS, per_kind)
    first = 0
    while any(n_missing.values()):
        examples = make_examples(seed, range(first, first + _BATCH))
        for image, questions in zip(examples.images, examples.questions, strict=True):
            for question in questions:
                if n_missing[question.kind]:
                    n_missing[question.kind] -= 1
                    yield image, question
        first += _BATCH
