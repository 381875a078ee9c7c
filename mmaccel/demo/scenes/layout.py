"""Scenes: what is in an image or a clip, and where in every frame; a still has one frame.

A scene is one to three objects on a ground, drawn from a counter-based generator keyed by (seed,
index): scene 17 of seed 3 is the same scene on every machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

CANVAS = 64
COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "white")
SHAPES = ("circle", "square", "triangle", "star", "ring")
SIZES = ("small", "large")
BACKGROUNDS = ("grass", "sand", "water", "snow", "night")
TEXTURES = ("plain", "stripes", "speckles")
VERTICAL, HORIZONTAL = ("above", "below"), ("left of", "right of")
RELATIONS = (*VERTICAL, *HORIZONTAL, "inside")

_HOLLOW = ("circle", "square", "ring")  # shapes with space for a small object inside
_MARGIN = 2.4
_GAP = 2.0
_RADIUS = {"small": (8.0, 9.2), "large": (12.9, 14.2)}
_RADIUS_INNER = (6.6, 7.2)
_RADIUS_OUTER = (13.9, 14.7)

Point = tuple[float, float]


@dataclass(frozen=True)
class Thing:
    """One object; lengths are pixels, and what its world has no word for is left out."""

    colour: str
    shape: str
    track: tuple[Point, ...]  # x and y of its centre in each frame
    radius: float
    angle: float  # how far it is turned, radians
    texture: str = "plain"
    texture_phase: float = 0.0
    seen: tuple[bool, ...] = (True,)  # whether it is there, of each frame
    size: str = ""
    direction: str = ""  # "" at rest, as `speed`
    speed: str = ""
    event: str = ""  # "appears", "vanishes" or ""
    dot: str | None = None  # colour of the dot on it
    dot_x: float = 0.0
    dot_y: float = 0.0

    @property
    def x(self) -> float:
        return self.track[0][0]

    @property
    def y(self) -> float:
        return self.track[0][1]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One scene."""

    objects: tuple[Thing, ...]  # the first is painted last
    # `relations[k]` says how `objects[0]` stands to `objects[k + 1]`
    relations: tuple[str, ...] = ()
    is_hit: bool = False  # the first object hits the second, which rests until then
    background: str
    light: float  # direction the light comes from, radians
    # strength of the ground's pattern; `phase` and `tilt` are its phase and direction
    relief: float
    phase: float
    tilt: float
    grain: float  # standard deviation of the film grain, in 0..1 of full range


def generator(seed: int, index: int, which: int = 0) -> np.random.Generator:
    """Random generator number `which` of image `index` of `seed` (Philox, counter-based)."""
    key = np.array([seed, index], dtype=np.uint64)
    counter = np.array([0, 0, 0, which], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def draw_scene(rng: np.random.Generator) -> Scene:
    """A still whose objects do not overlap, except where one is inside another."""
    n_objects = int(rng.choice(3, p=(0.30, 0.50, 0.20))) + 1
    relations = _draw_relations(rng, n_objects)
    shapes = [str(s) for s in rng.choice(SHAPES, n_objects)]
    sizes = _draw_sizes(rng, relations, n_objects)
    colours = [str(c) for c in rng.permutation(COLOURS)[:n_objects]]
    radii = [float(rng.uniform(*_RADIUS[s])) for s in sizes]
    if "inside" in relations:
        shapes[1] = str(rng.choice(_HOLLOW))
        radii[0], radii[1] = float(rng.uniform(*_RADIUS_INNER)), float(rng.uniform(*_RADIUS_OUTER))
    places = _draw_places(rng, relations, radii)
    objects = [
        Thing(colours[k], shapes[k], (places[k],), radii[k], size=sizes[k], **draw_look(rng))
        for k in range(n_objects)
    ]
    ground = draw_ground(rng, relief=(0.6, 1.4), grain=(0.010, 0.028))
    return Scene(objects=tuple(objects), relations=relations, **ground)


def draw_look(rng: np.random.Generator) -> dict[str, Any]:
    """Turn and texture of an object."""
    return {
        "angle": float(rng.uniform(-0.16, 0.16)),
        "texture": str(rng.choice(TEXTURES)),
        "texture_phase": float(rng.uniform(0, math.tau)),
    }


def draw_ground(rng: np.random.Generator, relief: Point, grain: Point) -> dict[str, Any]:
    """What a scene has besides its objects; the ranges are each world's own."""
    return {
        "background": str(rng.choice(BACKGROUNDS)),
        "light": float(rng.uniform(0, math.tau)),
        "relief": float(rng.uniform(*relief)),
        "phase": float(rng.uniform(0, math.tau)),
        "tilt": float(rng.uniform(-0.5, 0.5)),
        "grain": float(rng.uniform(*grain)),
    }


def _draw_relations(rng: np.random.Generator, n_objects: int) -> tuple[str, ...]:
    if n_objects == 1:
        return ()
    first = str(rng.choice(RELATIONS))
    if n_objects == 2:
        return (first,)
    if first == "inside":
        return (first, str(rng.choice(VERTICAL + HORIZONTAL)))
    return (first, str(rng.choice(HORIZONTAL if first in VERTICAL else VERTICAL)))


def _draw_sizes(rng: np.random.Generator, relations: tuple[str, ...], n_objects: int) -> list[str]:
    if "inside" in relations:
        return ["small", "large", "small"][:n_objects]
    sizes = [str(s) for s in rng.choice(SIZES, n_objects)]
    if n_objects == 3 and sizes.count("large") > 1:  # three need the space: at most one large
        keep = int(rng.integers(3))
        sizes = ["large" if k == keep else "small" for k in range(3)]
    return sizes


def _draw_places(
    rng: np.random.Generator, relations: tuple[str, ...], radii: list[float]
) -> list[Point]:
    """Places for the objects, redrawn until the second and third stand apart."""
    while True:
        places = _propose(rng, relations, radii)
        if len(places) < 3:
            return places
        (ax, ay), (bx, by) = places[1], places[2]
        if max(abs(ax - bx), abs(ay - by)) >= radii[1] + radii[2] + _GAP:
            return places


def _propose(
    rng: np.random.Generator, relations: tuple[str, ...], radii: list[float]
) -> list[Point]:
    is_inside = relations[:1] == ("inside",)
    anchor = 1 if is_inside else 0
    edges = [_MARGIN + radius for radius in radii]
    place = [rng.uniform(_MARGIN + r, CANVAS - _MARGIN - r, 2).tolist() for r in radii]
    beside = [(k, r) for k, r in enumerate(relations, start=1) if r != "inside"]
    for k, relation in beside:
        axis = 1 if relation in VERTICAL else 0
        first, last = (anchor, k) if relation in ("above", "left of") else (k, anchor)
        slack = CANVAS - 2 * _MARGIN - 2 * radii[first] - 2 * radii[last] - _GAP
        low, high = sorted(rng.uniform(0, max(slack, 0.0), 2))
        place[first][axis] = edges[first] + low
        place[last][axis] = _MARGIN + 2 * radii[first] + _GAP + radii[last] + high
    for k, relation in beside:  # stay near the anchor's row or column
        across = 0 if relation in VERTICAL else 1
        near = place[anchor][across] + rng.uniform(-7, 7)
        place[k][across] = float(np.clip(near, edges[k], CANVAS - edges[k]))
    if is_inside:
        place[0] = [place[1][0] + rng.uniform(-0.7, 0.7), place[1][1] + rng.uniform(-0.7, 0.7)]
    return [(float(x), float(y)) for x, y in place]
