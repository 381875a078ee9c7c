"""Busy scenes: three to seven objects, no two of the same colour and shape, one or two signs with a
number of two digits, and strokes of clutter.

Large objects may carry a dot of another colour. A sign lies within one tile of the image, so that
one view shows it whole. Neither objects nor signs overlap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mmaccel.demo.scenes.layout import (
    COLOURS,
    SHAPES,
    Point,
    Scene,
    Thing,
    draw_ground,
    draw_look,
)

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
    """One busy scene."""
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
    found: dict[int, Point] = {}
    for k in sorted(range(len(reaches)), key=lambda k: -reaches[k]):
        reach = reaches[k]
        low = _MARGIN + reach
        for x, y in rng.uniform(low, CANVAS - low, (40, 2)).tolist():
            is_free = all(
                math.hypot(x - ox, y - oy) >= reach + reaches[o] + _GAP
                for o, (ox, oy) in found.items()
            ) and all(_gap(x, y, corner) >= reach + _GAP for corner in corners)
            if is_free:
                found[k] = (x, y)
                break
        else:
            return None
    return [found[k] for k in range(len(reaches))]


def _gap(x: float, y: float, corner: tuple[int, int]) -> float:
    """How far a point lies from a sign."""
    left, top = corner
    dx = max(left - x, 0.0, x - (left + SIGN_WIDTH))
    dy = max(top - y, 0.0, y - (top + SIGN_HEIGHT))
    return math.hypot(dx, dy)
