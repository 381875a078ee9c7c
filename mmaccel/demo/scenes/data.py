"""Scenes: captioned images, image `index` of `seed`, and the closed list of caption words.

Training, validation and evaluation draw from different seeds, so they share no image. How captions
become ids is `mmaccel.pipelines.models.scenes_vocabulary`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from mmaccel.demo.scenes.caption import write_caption
from mmaccel.demo.scenes.layout import Scene, draw_scene, generator
from mmaccel.demo.scenes.render import draw_noise, render
from mmaccel.pipelines.models import scenes_vocabulary as caption_words

WORDS = (
    "a an the and is of to on at in inside above over below under left right "
    "small little large big red green blue yellow purple orange white "
    "circle square triangle star ring grass sand water snow night"
).split()
MAX_WORDS = 32


@dataclass(frozen=True)
class CaptionWords(caption_words.CaptionWords):
    """The words of scenes; see `mmaccel.pipelines.models.scenes_vocabulary.CaptionWords`."""

    words: tuple[str, ...] = tuple(WORDS)
    max_words: int = MAX_WORDS


TRAIN_SEED = 1
VALIDATION_SEED = 2
EVALUATION_SEED = 3
TOKENIZER_SEED = 4


def make_scenes(seed: int, indices: Iterable[int]) -> tuple[list[Scene], list[str], Tensor]:
    """Makes captioned images.

    Args:
        seed: which collection.
        indices: which images of it.

    Returns:
        Scenes, captions, and images [B, 3, 64, 64] uint8. The result for an index does not
        depend on the others.
    """
    scenes, captions, noises = [], [], []
    for index in indices:
        rng = generator(seed, index)
        scene = draw_scene(rng)
        scenes.append(scene)
        captions.append(write_caption(rng, scene))
        noises.append(draw_noise(rng))
    return scenes, captions, render(scenes, noises)


def make_captions(seed: int, indices: Iterable[int]) -> list[str]:
    """The captions alone (the same as `make_scenes` gives, without drawing)."""
    captions = []
    for index in indices:
        rng = generator(seed, index)
        captions.append(write_caption(rng, draw_scene(rng)))
    return captions
