"""Captions of clips: a noun such as `a red circle`, what it does (`rests`, `moves [slowly|quickly]
left`, `appears [and moves left]`, `[moves left and] vanishes`, `moves left and hits a blue
square`), optionally `and`, a second noun and what that does, and `over grass` or `at night`, first
or last.
"""

from __future__ import annotations

import numpy as np

from mmaccel.demo.moving_scenes.layout import COLOURS, DIRECTIONS, EVENTS, SHAPES, SPEEDS
from mmaccel.demo.scenes.caption import Kinds, Reading, read_words, unreadable
from mmaccel.demo.scenes.layout import BACKGROUNDS, Scene, Thing

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
    """Reads a caption of a clip; capitals, commas and full stops do not matter.

    Raises:
        OptionError: the words are not a sentence of the language.
    """
    example = "a red circle moves left over grass"
    reading = read_words(caption, _KINDS, example)
    if len(reading.objects) > 2 or (reading.is_hit and len(reading.objects) < 2):
        raise unreadable(caption, "one or two objects", example)
    return reading
