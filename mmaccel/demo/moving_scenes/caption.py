"""Moving scenes: captions, written from a description and read back.

The language: a noun such as `a red circle`, what it does (`rests`, `moves [slowly|quickly] left`,
`appears [and moves left]`, `[moves left and] vanishes`, `moves left and hits a blue square`),
optionally `and` with a second noun and what that does, and `over grass` or `at night`, first or
last. Every caption that `write_caption` writes can be read by `read_caption`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmaccel.checks import show
from mmaccel.demo.moving_scenes.layout import (
    COLOURS,
    DIRECTIONS,
    SHAPES,
    SPEEDS,
    Actor,
    MovingScene,
)
from mmaccel.demo.scenes.layout import BACKGROUNDS
from mmaccel.errors import OptionError
from mmaccel.pipelines.models.scenes_vocabulary import split_words

EVENTS = ("appears", "vanishes")
_VERBS = ("moves", "rests", "hits", *EVENTS)
_FILLER = ("a", "an", "the", "and", "over", "on", "at")


@dataclass(frozen=True)
class Wanted:
    """One object a caption asks for.

    Attributes:
        colour, shape: its words.
        direction: one of `DIRECTIONS`, or "" for an object at rest.
        speed: one of `SPEEDS`, or "" where the caption does not say.
        event: "appears", "vanishes" or "".
    """

    colour: str
    shape: str
    direction: str
    speed: str
    event: str


@dataclass(frozen=True)
class Reading:
    """What a caption asks for; `is_hit`: the first object hits the second."""

    objects: tuple[Wanted, ...]
    is_hit: bool
    background: str | None


def write_caption(rng: np.random.Generator, scene: MovingScene) -> str:
    """Writes a caption: speeds are left out 3 times in 10, the background once in 20.

    Args:
        rng: where the choice of words comes from.
        scene: what to describe.

    Returns:
        Lower-case words separated by single blanks.
    """
    first = scene.actors[0]
    words = f"{_noun(rng, first)} {_doing(rng, first)}"
    if scene.is_hit:
        words += f" and hits {_noun(rng, scene.actors[1])}"
    elif len(scene.actors) > 1:
        words += f" and {_noun(rng, scene.actors[1])} {_doing(rng, scene.actors[1])}"
    if rng.random() < 0.05:
        return words
    if scene.background == "night":
        where = "at night"
    else:
        article = "the " if rng.random() < 0.2 else ""
        where = f"{rng.choice(('over', 'over', 'on'))} {article}{scene.background}"
    return f"{where} {words}" if rng.random() < 0.1 else f"{words} {where}"


def _noun(rng: np.random.Generator, actor: Actor) -> str:
    article = "a " if rng.random() < 0.85 else "the "
    return f"{article}{actor.colour} {actor.shape}"


def _doing(rng: np.random.Generator, actor: Actor) -> str:
    if not actor.direction:
        return actor.event or "rests"
    pace = f"{actor.speed} " if actor.speed and rng.random() < 0.7 else ""
    moves = f"moves {pace}{actor.direction}"
    if actor.event == "appears":
        return f"appears and {moves}"
    return f"{moves} and vanishes" if actor.event else moves


def read_caption(caption: str) -> Reading:
    """Reads a caption of the language.

    Args:
        caption: words; capitals, commas and full stops do not matter.

    Returns:
        Objects, whether one hits the other, and the background.

    Raises:
        OptionError: the words are not a sentence of the language.
    """
    objects: list[dict[str, str]] = []
    colour, background, is_hit = "", None, False
    for word in split_words(caption):
        if word in COLOURS:
            colour = word
        elif word in SHAPES:
            if not colour:
                raise _unreadable(caption, f"a colour before '{word}'")
            objects.append({"colour": colour, "shape": word})
            colour = ""
        elif word in BACKGROUNDS:
            background = word
        elif word in (*DIRECTIONS, *SPEEDS, *_VERBS):
            if not objects:
                raise _unreadable(caption, f"an object before '{word}'")
            is_hit |= word == "hits"
            objects[-1] |= _facts(word)
        elif word not in _FILLER:
            raise _unreadable(caption, f"a word of the language instead of '{word}'")
    if not 1 <= len(objects) <= 2 or (is_hit and len(objects) < 2):
        raise _unreadable(caption, "one or two objects")
    named = [
        Wanted(
            colour=each["colour"],
            shape=each["shape"],
            direction=each.get("direction", ""),
            speed=each.get("speed", ""),
            event=each.get("event", ""),
        )
        for each in objects
    ]
    return Reading(tuple(named), is_hit, background)


def _facts(word: str) -> dict[str, str]:
    """What a word says of the object before it."""
    if word in DIRECTIONS:
        return {"direction": word}
    if word in SPEEDS:
        return {"speed": word}
    return {"event": word} if word in EVENTS else {}


def _unreadable(caption: str, expected: str) -> OptionError:
    return OptionError(
        f"caption: expected {expected}, received {show(caption)}. "
        "Write for example 'a red circle moves left over grass'."
    )
