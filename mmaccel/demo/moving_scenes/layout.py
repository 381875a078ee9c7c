"""Moving scenes: what is in a clip, where it is in every frame, and what happens.

A clip shows one or two objects over a ground that stays. An object rests or moves straight on; it
may appear or vanish on the way, or hit the other, which takes its motion over. Clips are drawn from
the counter-based generator of `scenes`, so clip 17 of seed 3 is the same on every machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mmaccel.demo.scenes.layout import BACKGROUNDS, CANVAS

N_FRAMES = 10
COLOURS = ("red", "green", "blue", "yellow", "purple", "white")
SHAPES = ("circle", "square", "triangle", "ring")
DIRECTIONS: dict[str, tuple[int, int]] = {  # x and y of one step, in pixels of the canvas
    "left": (-1, 0),
    "right": (1, 0),
    "up": (0, -1),
    "down": (0, 1),
}
SPEEDS: dict[str, tuple[float, float]] = {"slowly": (1.2, 1.8), "quickly": (3.2, 4.1)}

_PLOTS = ("one", "two", "hit")
_SHARES = (0.62, 0.20, 0.18)
_EVENTS = ("", "appears", "vanishes")
_RADIUS = (8.0, 10.0)
_HIT_SPEED = (1.5, 2.5)
_MARGIN = 2.0
_GAP = 2.0


@dataclass(frozen=True)
class Actor:
    """One object of a clip.

    Attributes:
        colour, shape: its words.
        direction: one of `DIRECTIONS`, or "" at rest.
        speed: one of `SPEEDS`, or "" at rest and where one hits the other.
        event: "appears", "vanishes" or "".
        radius: pixels.
        angle: how far it is turned, radians.
        track: x and y of its centre in each frame, pixels.
        seen: whether it is there, of each frame.
    """

    colour: str
    shape: str
    direction: str
    speed: str
    event: str
    radius: float
    angle: float
    track: tuple[tuple[float, float], ...]
    seen: tuple[bool, ...]


@dataclass(frozen=True)
class MovingScene:
    """One clip.

    Attributes:
        actors: one or two objects of different colours.
        is_hit: the first object hits the second, which rests until then.
        background: one of `BACKGROUNDS`.
        light: direction the light comes from, radians.
        relief, phase, tilt: of the ground's pattern, see `mmaccel.demo.scenes.layout.Scene`.
        grain: standard deviation of the film grain of a frame, in 0..1 of full range.
    """

    actors: tuple[Actor, ...]
    is_hit: bool
    background: str
    light: float
    relief: float
    phase: float
    tilt: float
    grain: float


def draw_moving_scene(rng: np.random.Generator) -> MovingScene:
    """Draws one clip's description.

    Args:
        rng: a generator from `mmaccel.demo.scenes.layout.generator(seed, index)`.

    Returns:
        Objects stay inside the canvas and never overlap.
    """
    plot = str(rng.choice(_PLOTS, p=_SHARES))
    if plot == "hit":
        actors = _draw_hit(rng)
    elif plot == "two":
        actors = _draw_two(rng)
    else:
        actors = (_draw_actor(rng, *_draw_looks(rng, 1)[0]),)
    return MovingScene(
        actors=actors,
        is_hit=plot == "hit",
        background=str(rng.choice(BACKGROUNDS)),
        light=float(rng.uniform(0, math.tau)),
        relief=float(rng.uniform(0.6, 1.4)),
        phase=float(rng.uniform(0, math.tau)),
        tilt=float(rng.uniform(-0.5, 0.5)),
        grain=float(rng.uniform(0.008, 0.022)),
    )


def _draw_looks(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
    """Colours, all different, and shapes."""
    colours = [str(c) for c in rng.permutation(COLOURS)[:count]]
    return [(colour, str(rng.choice(SHAPES))) for colour in colours]


def _draw_actor(rng: np.random.Generator, colour: str, shape: str) -> Actor:
    """An object by itself: at rest one time in seven; an event one time in three."""
    event = str(rng.choice(_EVENTS, p=(0.66, 0.17, 0.17)))
    direction, speed, step = "", "", (0.0, 0.0)
    if rng.random() > 1 / 7:
        direction = str(rng.choice(tuple(DIRECTIONS)))
        speed = str(rng.choice(tuple(SPEEDS)))
        pace = float(rng.uniform(*SPEEDS[speed]))
        step = (DIRECTIONS[direction][0] * pace, DIRECTIONS[direction][1] * pace)
    seen = [True] * N_FRAMES
    if event == "appears":
        first = int(rng.integers(2, 6))
        seen = [frame >= first for frame in range(N_FRAMES)]
    elif event == "vanishes":
        last = int(rng.integers(4, 8))
        seen = [frame < last for frame in range(N_FRAMES)]
    radius = float(rng.uniform(*_RADIUS))
    x = _draw_start(rng, radius, step[0] * (N_FRAMES - 1))
    y = _draw_start(rng, radius, step[1] * (N_FRAMES - 1))
    return Actor(
        colour=colour,
        shape=shape,
        direction=direction,
        speed=speed,
        event=event,
        radius=radius,
        angle=float(rng.uniform(-0.16, 0.16)),
        track=tuple((x + frame * step[0], y + frame * step[1]) for frame in range(N_FRAMES)),
        seen=tuple(seen),
    )


def _draw_start(rng: np.random.Generator, radius: float, way: float) -> float:
    """A coordinate from which an object can go `way` pixels without leaving the canvas."""
    low = _MARGIN + radius - min(way, 0.0)
    high = CANVAS - _MARGIN - radius - max(way, 0.0)
    return float(rng.uniform(low, max(low, high)))


def _draw_two(rng: np.random.Generator) -> tuple[Actor, ...]:
    """Two objects that never come near each other, drawn until they do not."""
    looks = _draw_looks(rng, 2)
    while True:
        first, second = (_draw_actor(rng, colour, shape) for colour, shape in looks)
        apart = first.radius + second.radius + _GAP
        pairs = zip(first.track, second.track, strict=True)
        if all(math.hypot(a - c, b - d) >= apart for (a, b), (c, d) in pairs):
            return first, second


def _draw_hit(rng: np.random.Generator) -> tuple[Actor, ...]:
    """One object runs into another, stops, and the other goes on as fast as it came."""
    (colour, shape), (other_colour, other_shape) = _draw_looks(rng, 2)
    direction = str(rng.choice(tuple(DIRECTIONS)))
    axis = 0 if DIRECTIONS[direction][0] else 1
    sign = DIRECTIONS[direction][axis]
    pace = float(rng.uniform(*_HIT_SPEED))
    contact = int(rng.integers(3, 6))  # the frame in which they touch
    radius, other_radius = (float(r) for r in rng.uniform(_RADIUS[0], 9.0, 2))
    # Along the motion: the run, both radii, and the way of the second. Across: a common line.
    run, rest = pace * contact, pace * (N_FRAMES - 1 - contact)
    slack = CANVAS - 2 * _MARGIN - 2 * radius - 2 * other_radius - run - rest
    start = _MARGIN + radius + float(rng.uniform(0, max(slack, 0.0)))
    line = float(rng.uniform(_MARGIN + 10, CANVAS - _MARGIN - 10))
    lines = (line, line + float(rng.uniform(-1.5, 1.5)))
    tracks: list[tuple[tuple[float, float], ...]] = []
    for number in range(2):
        points = []
        for frame in range(N_FRAMES):
            moved = pace * (min(frame, contact) if number == 0 else max(frame - contact, 0))
            begin = start if number == 0 else start + run + radius + other_radius
            along = begin + moved
            along = along if sign > 0 else CANVAS - along
            points.append((along, lines[number]) if axis == 0 else (lines[number], along))
        tracks.append(tuple(points))
    seen = (True,) * N_FRAMES
    angles = [float(a) for a in rng.uniform(-0.16, 0.16, 2)]
    return (
        Actor(colour, shape, direction, "", "", radius, angles[0], tracks[0], seen),
        Actor(other_colour, other_shape, "", "", "", other_radius, angles[1], tracks[1], seen),
    )
