"""Captioned stills, image `index` of `seed`; training, validation and evaluation share no image.

The language of captions, which are written from a scene and read back: `[the|a|an] [size] colour
shape`, a relation, a second object, optionally `and`, a relation and a third object (both relations
speak of the first object), and `on the grass` or `at night`, first or last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from mmaccel.checks import show
from mmaccel.demo.scenes.layout import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    Scene,
    Thing,
    draw_scene,
    generator,
)
from mmaccel.demo.scenes.render import draw_noise, render
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

# words by what they say something about, with what they say where it is not themselves; "" has
# those that say nothing
Kinds = Mapping[str, tuple[str, ...] | Mapping[str, str]]

_KINDS: Kinds = {
    "colour": COLOURS,
    "shape": SHAPES,
    "background": BACKGROUNDS,
    "size": {"small": "small", "little": "small", "large": "large", "big": "large"},
    "relation": {
        **{"above": "above", "over": "above", "below": "below", "under": "below"},
        **{"left": "left of", "right": "right of", "inside": "inside", "in": "inside"},
    },
    "": ("a", "an", "the", "to", "of", "is", "and", "on", "at"),
}


@dataclass(frozen=True)
class Wanted:
    """One object a caption asks for; None or "" is what the caption does not say."""

    colour: str
    shape: str
    size: str | None = None
    direction: str = ""
    speed: str = ""
    event: str = ""


@dataclass(frozen=True)
class Reading:
    """What a caption asks for; `relations[k]` is how the first object stands to object k + 1."""

    objects: tuple[Wanted, ...]
    relations: tuple[str, ...]
    background: str | None
    is_hit: bool


def write_caption(rng: np.random.Generator, scene: Scene) -> str:
    """The caption of a still: sizes are left out 3 times in 10, the background once in 20."""
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


def _noun(rng: np.random.Generator, thing: Thing) -> str:
    size = f"{rng.choice(_SIZE_WORDS[thing.size])} " if rng.random() < 0.7 else ""
    rest = f"{size}{thing.colour} {thing.shape}"
    draw = rng.random()
    if draw < 0.8:
        return f"{'an' if rest[0] in 'aeiou' else 'a'} {rest}"
    return f"the {rest}" if draw < 0.9 else rest


def read_caption(caption: str) -> Reading:
    """Reads a caption of a still; capitals, commas and full stops do not matter."""
    example = "a red circle above a small blue square on grass"
    reading = read_words(caption, _KINDS, example)
    if len(reading.relations) != len(reading.objects) - 1 or len(reading.objects) > 3:
        expected = "one relation for each object after the first, three objects at most"
        raise unreadable(caption, expected, example)
    return reading


def read_words(caption: str, kinds: Kinds, example: str) -> Reading:
    """Reads the words of a caption; a shape ends an object's noun, which later facts are of."""
    objects: list[dict[str, str]] = []
    noun: dict[str, str] = {}
    relations: list[str] = []
    background, is_hit = None, False
    for word in split_words(caption):
        kind = next((kind for kind, words in kinds.items() if word in words), None)
        if kind is None:
            raise unreadable(caption, f"a word of the language instead of '{word}'", example)
        words = kinds[kind]
        value = words[word] if isinstance(words, Mapping) else word
        if kind in ("colour", "size"):
            noun[kind] = value
        elif kind == "shape":
            if "colour" not in noun:
                raise unreadable(caption, f"a colour before '{word}'", example)
            objects.append({**noun, "shape": word})
            noun = {}
        elif kind == "background":
            background = value
        elif kind == "relation":
            relations.append(value)
        elif kind == "hit":
            is_hit = True
        elif kind:
            if not objects:
                raise unreadable(caption, f"an object before '{word}'", example)
            objects[-1][kind] = value
    if not objects:
        raise unreadable(caption, "at least one object, such as 'a red circle'", example)
    named = tuple(Wanted(**each) for each in objects)
    return Reading(named, tuple(relations), background, is_hit)


def unreadable(caption: str, expected: str, example: str) -> OptionError:
    return OptionError(
        f"caption: expected {expected}, received {show(caption)}. Write for example '{example}'."
    )


WORDS = (
    "a an the and is of to on at in inside above over below under left right "
    "small little large big red green blue yellow purple orange white "
    "circle square triangle star ring grass sand water snow night"
).split()
MAX_WORDS = 32
TRAIN_SEED, VALIDATION_SEED, EVALUATION_SEED, TOKENIZER_SEED = 1, 2, 3, 4


class World(NamedTuple):
    """Scenes that are drawn at random, described, and rendered; nothing depends on its batch."""

    draw: Callable[[np.random.Generator], Scene]
    describe: Callable[[np.random.Generator, Scene], str]
    n_frames: int = 1

    def make(self, seed: int, indices: Iterable[int]) -> tuple[list[Scene], list[str], Tensor]:
        """Some scenes, their captions, and frames [B, F, 3, 64, 64] uint8."""
        scenes, captions, noises = [], [], []
        for index in indices:
            rng = generator(seed, index)
            scenes.append(self.draw(rng))
            captions.append(self.describe(rng, scenes[-1]))
            noises.append(draw_noise(rng, self.n_frames))
        return scenes, captions, render(scenes, noises)

    def captions(self, seed: int, indices: Iterable[int]) -> list[str]:
        """The captions alone, without drawing."""
        generators = [generator(seed, index) for index in indices]
        return [self.describe(rng, self.draw(rng)) for rng in generators]


STILLS = World(draw_scene, write_caption)
make_captions = STILLS.captions


def make_scenes(seed: int, indices: Iterable[int]) -> tuple[list[Scene], list[str], Tensor]:
    """Some scenes, their captions, and images [B, 3, 64, 64] uint8."""
    scenes, captions, frames = STILLS.make(seed, indices)
    return scenes, captions, frames[:, 0]
