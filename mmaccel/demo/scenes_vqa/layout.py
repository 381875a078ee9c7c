"""Busy scenes: what is in an image, and where.

A scene has three to seven objects, no two of the same colour and shape, one or two signs with a
number of two digits, and strokes of clutter. Large objects may carry a dot of another colour. A
sign lies within one tile of the image, so that one view shows it whole.

Everything about image `index` of `seed` comes from a counter-based generator keyed by the two,
so it is the same on every machine, whatever was drawn before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mmaccel.demo.scenes.layout import BACKGROUNDS, COLOURS, SHAPES, TEXTURES, Scene, SceneObject

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
class Thing(SceneObject):
    """One object; `dot` is the colour of the dot on it, None where there is none."""

    dot: str | None
    dot_x: float
    dot_y: float


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


@dataclass(frozen=True)
class BusyScene(Scene):
    """One scene.

    Attributes:
        things: three to seven objects; the same as `objects`.
        signs: one or two, of different colours.
        strokes: clutter below the objects.
    """

    things: tuple[Thing, ...]
    signs: tuple[Sign, ...]
    strokes: tuple[Stroke, ...]


def stream(seed: int, index: int, which: int) -> np.random.Generator:
    """Random generator number `which` of image `index` of `seed` (Philox, counter-based)."""
    key = np.array([seed, index], dtype=np.uint64)
    counter = np.array([0, 0, 0, which], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def draw_scene(rng: np.random.Generator) -> BusyScene:
    """Draws one scene.

    Args:
        rng: a generator from `stream(seed, index, 0)`.

    Returns:
        A scene in which neither objects nor signs overlap.
    """
    n_things = int(rng.integers(3, 8))
    pairs = rng.permutation(len(COLOURS) * len(SHAPES))[:n_things]
    nouns = [(COLOURS[p // len(SHAPES)], SHAPES[p % len(SHAPES)]) for p in pairs]
    large = rng.random(n_things) < 0.5
    large[np.flatnonzero(large)[_MOST_LARGE:]] = False
    order = rng.permutation(n_things)
    sizes = ["large" if large[k] else "small" for k in order]
    radii = [float(rng.uniform(*_RADIUS[size])) for size in sizes]
    reaches = [r * _REACH[shape] for r, (_, shape) in zip(radii, nouns, strict=True)]
    n_signs = int(rng.integers(1, 3))
    corners, places = _draw_places(rng, n_signs, reaches)
    colours = rng.permutation(len(SIGN_COLOURS))[:n_signs]
    signs = tuple(
        Sign(SIGN_COLOURS[c], int(rng.integers(10, 100)), x, y)
        for c, (x, y) in zip(colours, corners, strict=True)
    )
    things = tuple(
        _draw_thing(rng, noun, size, radius, place)
        for noun, size, radius, place in zip(nouns, sizes, radii, places, strict=True)
    )
    return BusyScene(
        things,
        (),
        str(rng.choice(BACKGROUNDS)),
        float(rng.uniform(0, math.tau)),
        float(rng.uniform(0.5, 1.1)),
        float(rng.uniform(0, math.tau)),
        float(rng.uniform(-0.5, 0.5)),
        float(rng.uniform(0.008, 0.020)),
        things,
        signs,
        tuple(_draw_stroke(rng) for _ in range(int(rng.integers(3, 9)))),
    )


def _draw_thing(
    rng: np.random.Generator,
    noun: tuple[str, str],
    size: str,
    radius: float,
    place: tuple[float, float],
) -> Thing:
    colour, shape = noun
    others = [c for c in COLOURS if c != colour]
    dot = str(rng.choice(others))
    turn = float(rng.uniform(0, math.tau))
    away = float(rng.uniform(0, 0.22)) * radius
    has_dot = size == "large" and shape in _HAS_DOT and rng.random() < 0.75
    return Thing(
        colour,
        shape,
        size,
        *place,
        radius,
        float(rng.uniform(-0.16, 0.16)),
        str(rng.choice(TEXTURES)),
        float(rng.uniform(0, math.tau)),
        dot if has_dot else None,
        place[0] + away * math.cos(turn),
        place[1] + away * math.sin(turn) + (0.18 * radius if shape == "triangle" else 0),
    )


def _draw_stroke(rng: np.random.Generator) -> Stroke:
    turn = float(rng.uniform(0, math.tau))
    length = float(rng.uniform(3, 8))
    x, y = rng.uniform(2, CANVAS - 2, 2)
    light = float(rng.choice((0.55, 1.5)))
    return Stroke(float(x), float(y), length * math.cos(turn), length * math.sin(turn), light)


def _draw_places(
    rng: np.random.Generator, n_signs: int, reaches: list[float]
) -> tuple[list[tuple[int, int]], list[tuple[float, float]]]:
    """Corners of signs and centres of objects, redrawn until all stand apart."""
    while True:
        corners = [_draw_corner(rng) for _ in range(n_signs)]
        if n_signs == 2 and not _apart(corners[0], corners[1]):
            continue
        centres = _draw_centres(rng, corners, reaches)
        if centres is not None:
            return corners, centres


def _draw_corner(rng: np.random.Generator) -> tuple[int, int]:
    column, row = (int(v) for v in rng.integers(0, CANVAS // TILE, 2))
    x = int(rng.integers(1, TILE - SIGN_WIDTH))
    y = int(rng.integers(1, TILE - SIGN_HEIGHT))
    return column * TILE + x, row * TILE + y


def _apart(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return abs(a[0] - b[0]) > SIGN_WIDTH + 2 or abs(a[1] - b[1]) > SIGN_HEIGHT + 2


def _draw_centres(
    rng: np.random.Generator, corners: list[tuple[int, int]], reaches: list[float]
) -> list[tuple[float, float]] | None:
    """Centres, the widest object's first; None where one found no room."""
    found: dict[int, tuple[float, float]] = {}
    for k in sorted(range(len(reaches)), key=lambda k: -reaches[k]):
        reach = reaches[k]
        low = _MARGIN + reach
        for x, y in rng.uniform(low, CANVAS - low, (40, 2)).tolist():
            is_free = all(
                math.hypot(x - ox, y - oy) >= reach + reaches[o] + _GAP
                for o, (ox, oy) in found.items()
            ) and all(_outside(x, y, reach + _GAP, corner) for corner in corners)
            if is_free:
                found[k] = (x, y)
                break
        else:
            return None
    return [found[k] for k in range(len(reaches))]


def _outside(x: float, y: float, far: float, corner: tuple[int, int]) -> bool:
    right, down = corner[0] + SIGN_WIDTH, corner[1] + SIGN_HEIGHT
    dx = max(corner[0] - x, 0.0, x - right)
    dy = max(corner[1] - y, 0.0, y - down)
    return math.hypot(dx, dy) >= far
