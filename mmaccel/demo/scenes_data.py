"""Scenes: captioned pictures, picture `index` of `seed`.

Training, validation and evaluation draw from different seeds, so they share no picture.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from mmaccel.demo.scenes_caption import write_caption
from mmaccel.demo.scenes_layout import Scene, draw_scene, generator
from mmaccel.demo.scenes_render import draw_noise, render

TRAIN_SEED, VALIDATION_SEED, EVALUATION_SEED, TOKENIZER_SEED = 1, 2, 3, 4


def make_scenes(seed: int, indices: Iterable[int]) -> tuple[list[Scene], list[str], Tensor]:
    """Makes captioned pictures.

    Args:
        seed: which collection.
        indices: which pictures of it.

    Returns:
        Scenes, captions, and pictures [B, 3, 64, 64] uint8. The result for an index does not
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
