"""Moving scenes: captioned clips, clip `index` of `seed`, and the closed list of caption words.

Training, validation and evaluation draw from different seeds, so they share no clip.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from mmaccel.demo.moving_scenes.caption import write_caption
from mmaccel.demo.moving_scenes.layout import MovingScene, draw_moving_scene
from mmaccel.demo.moving_scenes.render import draw_noise, render
from mmaccel.demo.scenes.layout import generator
from mmaccel.pipelines.models import scenes_vocabulary as caption_words

WORDS = (
    "a the and over on at moves rests hits appears vanishes slowly quickly left right up down "
    "red green blue yellow purple white circle square triangle ring grass sand water snow night"
).split()
MAX_WORDS = 24

TRAIN_SEED = 21
VALIDATION_SEED = 22
EVALUATION_SEED = 23
TOKENIZER_SEED = 24


@dataclass(frozen=True)
class CaptionWords(caption_words.CaptionWords):
    """The words of moving scenes."""

    words: tuple[str, ...] = tuple(WORDS)
    max_words: int = MAX_WORDS


def make_clips(seed: int, indices: Iterable[int]) -> tuple[list[MovingScene], list[str], Tensor]:
    """Makes captioned clips.

    Args:
        seed: which collection.
        indices: which clips of it.

    Returns:
        Descriptions, captions, and frames [B, F, 3, 64, 64] uint8. The result for an index does not
        depend on the others.
    """
    scenes, captions, noises = [], [], []
    for index in indices:
        rng = generator(seed, index)
        scene = draw_moving_scene(rng)
        scenes.append(scene)
        captions.append(write_caption(rng, scene))
        noises.append(draw_noise(rng))
    return scenes, captions, render(scenes, noises)


def make_captions(seed: int, indices: Iterable[int]) -> list[str]:
    """The captions alone (the same as `make_clips` gives, without drawing)."""
    captions = []
    for index in indices:
        rng = generator(seed, index)
        captions.append(write_caption(rng, draw_moving_scene(rng)))
    return captions
