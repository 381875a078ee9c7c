"""Scenes: what is in an image, and where.

A scene is one to three objects on a background. It is drawn from a counter-based generator
keyed by (seed, index), so scene 17 of seed 3 is the same scene on every machine, whatever was
drawn before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

CANVAS = 64
COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "white")
SHAPES = ("circle", "square", "triangle", "star", "ring")
SIZES = ("small", "large")
RELATIONS = ("above", "below", "left of", "right of", "inside")
BACKGROUNDS = ("grass", "sand", "water", "snow", "night")
TEXTURES = ("plain", "stripes", "speckles")

_HOLLOW = ("circle", "square", "ring")  # shapes with space for a small object inside
_MARGIN = 2.4
_GAP = 2.0
_RADIUS = {"small": (8.0, 9.2), "large": (12.9, 14.2)}
_RADIUS_INNER = (6.6, 7.2)
_RADIUS_OUTER = (13.9, 14.7)


@dataclass(frozen=True)
class SceneObject:
    """One object: its words (colour, shape, size) and its place in pixels."""

    colour: str
    shape: str
    size: str
    x: float
    y: float
    radius: float
    angle: float
    texture: str
    texture_phase: float


@dataclass(frozen=True)
class Scene:
    """One scene: objects, the relation of the first object to each other one, background and light.

    Attributes:
        objects: one to three objects; colours differ from each other.
        relations: `relations[k]` says how `objects[0]` stands to `objects[k + 1]`.
        background: one of `BACKGROUNDS`.
        light: direction the light comes from, radians.
        relief: strength of the background's texture, 0.6..1.4.
        phase: phase of the background's pattern, radians.
        tilt: direction of the background's pattern, radians.
        grain: standard deviation of the film grain, in 0..1 of full range.
    """

    objects: tuple[SceneObject, ...]
    relations: tuple[str, ...]
    background: str
    light: float
    relief: float
    phase: float
    tilt: float
    grain: float


def generator(seed: int, index: int) -> np.random.Generator:
    """The random generator of image `index` of `seed` (Philox, counter-based)."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, index], dtype=np.uint64)))


def draw_scene(rng: np.random.Generator) -> Scene:
    """Draws one scene.

    Args:
        rng: a generator from `generator(seed, index)`.

    Returns:
        A scene whose objects do not overlap, except where one is inside another.
    """
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
    objects = tuple(
        SceneObject(
            colours[k],
            shapes[k],
            sizes[k],
            places[k][0],
            places[k][1],
            radii[k],
            float(rng.uniform(-0.16, 0.16)),
            str(rng.choice(TEXTURES)),
            float(rng.uniform(0, math.tau)),
        )
        for k in range(n_objects)
    )
    return Scene(
        objects,
        relations,
        str(rng.choice(BACKGROUNDS)),
        float(rng.uniform(0, math.tau)),
        float(rng.uniform(0.6, 1.4)),
        float(rng.uniform(0, math.tau)),
        float(rng.uniform(-0.5, 0.5)),
        float(rng.uniform(0.010, 0.028)),
    )


def _draw_relations(rng: np.random.Generator, n_objects: int) -> tuple[str, ...]:
    if n_objects == 1:
        return ()
    first = str(rng.choice(RELATIONS))
    if n_objects == 2:
        return (first,)
    vertical, horizontal = ("above", "below"), ("left of", "right of")
    if first == "inside":
        return (first, str(rng.choice(vertical + horizontal)))
    return (first, str(rng.choice(horizontal if first in vertical else vertical)))


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
) -> list[tuple[float, float]]:
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
) -> list[tuple[float, float]]:
    anchor = 1 if relations and relations[0] == "inside" else 0
    place = [[_free(rng, r), _free(rng, r)] for r in radii]
    for k, relation in enumerate(relations, start=1):
        if relation == "inside":
            continue
        axis = 1 if relation in ("above", "below") else 0
        first, last = (anchor, k) if relation in ("above", "left of") else (k, anchor)
        slack = CANVAS - 2 * _MARGIN - 2 * radii[first] - 2 * radii[last] - _GAP
        low, high = sorted(rng.uniform(0, max(slack, 0.0), 2))
        place[first][axis] = _MARGIN + radii[first] + low
        place[last][axis] = _MARGIN + 2 * radii[first] + _GAP + radii[last] + high
    for k, relation in enumerate(relations, start=1):  # stay near the anchor's row or column
        if relation == "inside":
            continue
        across = 0 if relation in ("above", "below") else 1
        wanted = place[anchor][across] + rng.uniform(-7, 7)
        edge = _MARGIN + radii[k]
        place[k][across] = float(np.clip(wanted, edge, CANVAS - edge))
    if anchor == 1:
        place[0] = [place[1][0] + rng.uniform(-0.7, 0.7), place[1][1] + rng.uniform(-0.7, 0.7)]
    return [(float(x), float(y)) for x, y in place]


def _free(rng: np.random.Generator, radius: float) -> float:
    return float(rng.uniform(_MARGIN + radius, CANVAS - _MARGIN - radius))
