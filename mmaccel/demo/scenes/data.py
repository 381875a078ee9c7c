"""Captioned stills, image `index` of `seed`; training, validation and evaluation share no image."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from torch import Tensor

from mmaccel.demo.scenes.caption import write_caption
from mmaccel.demo.scenes.layout import Scene, draw_scene, generator
from mmaccel.demo.scenes.render import draw_noise, render

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
