"""Scenes: captions, written from a scene and read back.

The language: `[the|a|an] [size] colour shape`, a relation, a second object, optionally `and`
relation and a third object (both relations speak of the first object), and `on the grass` or
`at night`, first or last. Every caption written here can be read by `read_caption`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmaccel.demo.scenes.layout import BACKGROUNDS, COLOURS, SHAPES, Scene, SceneObject
from mmaccel.errors import OptionError
from mmaccel.pipelines.models.scenes_vocabulary import split_words

_RELATION_WORDS: dict[str, tuple[str, ...]] = {
    "above": ("above", "above", "over"),
    "below": ("below", "below", "under"),
    "left of": ("left of", "to the left of"),
    "right of": ("right of", "to the right of"),
    "inside": ("inside", "inside", "in"),
}
_SIZE_WORDS = {"small": ("small", "small", "little"), "large": ("large", "large", "big")}
_RELATION_OF = {
    "above": "above",
    "over": "above",
    "below": "below",
    "under": "below",
    "left": "left of",
    "right": "right of",
    "inside": "inside",
    "in": "inside",
}
_SIZE_OF = {"small": "small", "little": "small", "large": "large", "big": "large"}
_FILLER = ("a", "an", "the", "to", "of", "is")


@dataclass(frozen=True)
class Wanted:
    """One object a caption asks for; `size` is None where the caption does not say."""

    colour: str
    shape: str
    size: str | None


@dataclass(frozen=True)
class Reading:
    """What a caption asks for; `relations[k]` is how the first object stands to object k + 1."""

    objects: tuple[Wanted, ...]
    relations: tuple[str, ...]
    background: str | None


def write_caption(rng: np.random.Generator, scene: Scene) -> str:
    """Writes a caption: sizes are left out 3 times in 10, the background once in 20.

    Args:
        rng: where the choice of words comes from.
        scene: what to describe.

    Returns:
        Lower-case words separated by single blanks.
    """
    words = _noun(rng, scene.objects[0])
    for k, relation in enumerate(scene.relations, start=1):
        if k == 2:
            words += " and"
        words += f" {rng.choice(_RELATION_WORDS[relation])} {_noun(rng, scene.objects[k])}"
    if rng.random() < 0.05:
        return words
    if scene.background == "night":
        place = "at night"
    else:
        place = f"on {'the ' if rng.random() < 0.25 else ''}{scene.background}"
    return f"{place} {words}" if rng.random() < 0.2 else f"{words} {place}"


def _noun(rng: np.random.Generator, thing: SceneObject) -> str:
    size = f"{rng.choice(_SIZE_WORDS[thing.size])} " if rng.random() < 0.7 else ""
    rest = f"{size}{thing.colour} {thing.shape}"
    draw = rng.random()
    if draw < 0.8:
        return f"{'an' if rest[0] in 'aeiou' else 'a'} {rest}"
    return f"the {rest}" if draw < 0.9 else rest


def read_caption(caption: str) -> Reading:
    """Reads a caption of the scenes language.

    Args:
        caption: words; capitals, commas and full stops do not matter.

    Returns:
        Objects, relations and background.

    Raises:
        OptionError: the words are not a sentence of the language.
    """
    objects: list[Wanted] = []
    relations: list[str] = []
    background = colour = size = None
    for word in split_words(caption):
        if word in _SIZE_OF:
            size = _SIZE_OF[word]
        elif word in COLOURS:
            colour = word
        elif word in SHAPES:
            if colour is None:
                raise _unreadable(caption, f"a colour before '{word}'")
            objects.append(Wanted(colour, word, size))
            colour = size = None
        elif word in BACKGROUNDS:
            background = word
        elif word in _RELATION_OF:
            relations.append(_RELATION_OF[word])
        elif word not in (*_FILLER, "and", "on", "at"):
            raise _unreadable(caption, f"a word of the language instead of '{word}'")
    if not objects:
        raise _unreadable(caption, "at least one object, such as 'a red circle'")
    if len(relations) != len(objects) - 1 or len(objects) > 3:
        raise _unreadable(
            caption, "one relation for each object after the first, three objects at most"
        )
    return Reading(tuple(objects), tuple(relations), background)


def _unreadable(caption: str, expected: str) -> OptionError:
    return OptionError(
        f"caption: expected {expected}, received '{caption}'. "
        "Write for example 'a red circle above a small blue square on grass'."
    )
