"""Captioned clips, clip `index` of `seed`; training, validation and evaluation share no clip.

One or two objects, inside the canvas and never overlapping, rest or move straight on over a ground
that stays; one may appear or vanish on the way, or hit the other, which takes its motion over.

A caption is a noun such as `a red circle`, what it does (`rests`, `moves [slowly|quickly] left`,
`appears [and moves left]`, `[moves left and] vanishes`, `moves left and hits a blue square`),
optionally `and`, a second noun and what that does, and `over grass` or `at night`, first or last.
"""

from __future__ import annotations

import math

import numpy as np

from mmaccel.demo.scenes.data import Kinds, Reading, World, read_words, unreadable
from mmaccel.demo.scenes.layout import BACKGROUNDS, CANVAS, Scene, Thing, draw_ground

N_FRAMES = 10
COLOURS = ("red", "green", "blue", "yellow", "purple", "white")
SHAPES = ("circle", "square", "triangle", "ring")
# x and y of one step, in pixels of the canvas
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
SPEEDS = {"slowly": (1.2, 1.8), "quickly": (3.2, 4.1)}
EVENTS = ("", "appears", "vanishes")

_PLOTS = ("one", "two", "hit")
_SHARES = (0.62, 0.20, 0.18)
_RADIUS = (8.0, 10.0)
_HIT_SPEED = (1.5, 2.5)
_MARGIN = 2.0
_GAP = 2.0


def draw_moving_scene(rng: np.random.Generator) -> Scene:
    plot = str(rng.choice(_PLOTS, p=_SHARES))
    if plot == "hit":
        objects = _draw_hit(rng)
    elif plot == "two":
        objects = _draw_two(rng)
    else:
        objects = (_draw_thing(rng, *_draw_nouns(rng, 1)[0]),)
    ground = draw_ground(rng, relief=(0.6, 1.4), grain=(0.008, 0.022))
    return Scene(objects=objects, is_hit=plot == "hit", **ground)


def _draw_nouns(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
    """Colours, all different, and shapes."""
    colours = [str(c) for c in rng.permutation(COLOURS)[:count]]
    return [(colour, str(rng.choice(SHAPES))) for colour in colours]


def _draw_thing(rng: np.random.Generator, colour: str, shape: str) -> Thing:
    """An object by itself: at rest one time in seven; an event one time in three."""
    event = str(rng.choice(EVENTS, p=(0.66, 0.17, 0.17)))
    direction = speed = ""
    step_x = step_y = 0.0
    if rng.random() > 1 / 7:
        direction = str(rng.choice(tuple(DIRECTIONS)))
        speed = str(rng.choice(tuple(SPEEDS)))
        pace = float(rng.uniform(*SPEEDS[speed]))
        step_x, step_y = (way * pace for way in DIRECTIONS[direction])
    first, last = 0, N_FRAMES
    if event == "appears":
        first = int(rng.integers(2, 6))
    elif event == "vanishes":
        last = int(rng.integers(4, 8))
    radius = float(rng.uniform(*_RADIUS))
    x = _draw_start(rng, radius, step_x * (N_FRAMES - 1))
    y = _draw_start(rng, radius, step_y * (N_FRAMES - 1))
    return Thing(
        colour,
        shape,
        tuple((x + frame * step_x, y + frame * step_y) for frame in range(N_FRAMES)),
        radius,
        angle=float(rng.uniform(-0.16, 0.16)),
        seen=tuple(first <= frame < last for frame in range(N_FRAMES)),
        direction=direction,
        speed=speed,
        event=event,
    )


def _draw_start(rng: np.random.Generator, radius: float, way: float) -> float:
    """A coordinate from which an object can go `way` pixels without leaving the canvas."""
    low = _MARGIN + radius - min(way, 0.0)
    high = CANVAS - _MARGIN - radius - max(way, 0.0)
    return float(rng.uniform(low, max(low, high)))


def _draw_two(rng: np.random.Generator) -> tuple[Thing, ...]:
    """Two objects that never come near each other, drawn until they do not."""
    nouns = _draw_nouns(rng, 2)
    while True:
        first, second = (_draw_thing(rng, colour, shape) for colour, shape in nouns)
        apart = first.radius + second.radius + _GAP
        if all(math.dist(a, b) >= apart for a, b in zip(first.track, second.track, strict=True)):
            return first, second


def _draw_hit(rng: np.random.Generator) -> tuple[Thing, ...]:
    """One object runs into another, stops, and the other goes on as fast as it came."""
    nouns = _draw_nouns(rng, 2)
    direction = str(rng.choice(tuple(DIRECTIONS)))
    axis = 0 if DIRECTIONS[direction][0] else 1
    pace = float(rng.uniform(*_HIT_SPEED))
    contact = int(rng.integers(3, 6))  # the frame in which they touch
    radii = rng.uniform(_RADIUS[0], 9.0, 2).tolist()
    # Along the motion: the run, both radii, and the way of the second. Across: a common line.
    run, rest = pace * contact, pace * (N_FRAMES - 1 - contact)
    slack = CANVAS - 2 * _MARGIN - 2 * radii[0] - 2 * radii[1] - run - rest
    start = _MARGIN + radii[0] + float(rng.uniform(0, max(slack, 0.0)))
    line = float(rng.uniform(_MARGIN + 10, CANVAS - _MARGIN - 10))
    lines = (line, line + float(rng.uniform(-1.5, 1.5)))
    frames = np.arange(N_FRAMES)
    ways = (
        start + pace * np.minimum(frames, contact),
        start + run + radii[0] + radii[1] + pace * np.maximum(frames - contact, 0),
    )
    objects = []
    for k, angle in enumerate(rng.uniform(-0.16, 0.16, 2).tolist()):
        # the ways are those to the right or down, of which the others are mirror images
        along = ways[k] if DIRECTIONS[direction][axis] > 0 else CANVAS - ways[k]
        track = [(a, lines[k]) if axis == 0 else (lines[k], a) for a in along.tolist()]
        objects.append(
            Thing(
                *nouns[k],
                tuple(track),
                radii[k],
                angle,
                seen=(True,) * N_FRAMES,
                direction="" if k else direction,
            )
        )
    return tuple(objects)


_KINDS: Kinds = {
    "colour": COLOURS,
    "shape": SHAPES,
    "background": BACKGROUNDS,
    "direction": tuple(DIRECTIONS),
    "speed": tuple(SPEEDS),
    "event": EVENTS[1:],
    "hit": ("hits",),
    "": ("a", "an", "the", "and", "over", "on", "at", "moves", "rests"),
}


def write_caption(rng: np.random.Generator, scene: Scene) -> str:
    """The caption of a clip: speeds are left out 3 times in 10, the background once in 20."""
    first, *others = scene.objects
    words = f"{_noun(rng, first)} {_doing(rng, first)}"
    for other in others:
        if scene.is_hit:
            words += f" and hits {_noun(rng, other)}"
        else:
            words += f" and {_noun(rng, other)} {_doing(rng, other)}"
    if rng.random() < 0.05:
        return words
    if scene.background == "night":
        where = "at night"
    else:
        article = "the " if rng.random() < 0.2 else ""
        where = f"{rng.choice(('over', 'over', 'on'))} {article}{scene.background}"
    return f"{where} {words}" if rng.random() < 0.1 else f"{words} {where}"


def _noun(rng: np.random.Generator, thing: Thing) -> str:
    return f"{'a' if rng.random() < 0.85 else 'the'} {thing.colour} {thing.shape}"


def _doing(rng: np.random.Generator, thing: Thing) -> str:
    if not thing.direction:
        return thing.event or "rests"
    pace = f"{thing.speed} " if thing.speed and rng.random() < 0.7 else ""
    moves = f"moves {pace}{thing.direction}"
    if thing.event == "appears":
        return f"appears and {moves}"
    return f"{moves} and vanishes" if thing.event else moves


def read_caption(caption: str) -> Reading:
    """Reads a caption of a clip; capitals, commas and full stops do not matter."""
    example = "a red circle moves left over grass"
    reading = read_words(caption, _KINDS, example)
    if len(reading.objects) > 2 or (reading.is_hit and len(reading.objects) < 2):
        raise unreadable(caption, "one or two objects", example)
    return reading


WORDS = (
    "a the and over on at moves rests hits appears vanishes slowly quickly left right up down "
    "red green blue yellow purple white circle square triangle ring grass sand water snow night"
).split()
MAX_WORDS = 24
TRAIN_SEED, VALIDATION_SEED, EVALUATION_SEED, TOKENIZER_SEED = 21, 22, 23, 24

CLIPS = World(draw_moving_scene, write_caption, N_FRAMES)
make_clips = CLIPS.make
make_captions = CLIPS.captions
