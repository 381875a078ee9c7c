"""Busy scenes, image `index` of `seed`: its picture, its map and its questions.

Training, validation and evaluation draw from different seeds, so they share no image.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from mmaccel.demo.scenes.layout import generator
from mmaccel.demo.scenes.render import draw_noise
from mmaccel.demo.scenes_vqa.layout import CANVAS, BusyScene, draw_scene
from mmaccel.demo.scenes_vqa.questions import KINDS, Question, ask
from mmaccel.demo.scenes_vqa.render import render

TRAIN_SEED, VALIDATION_SEED, EVALUATION_SEED = 21, 22, 23
_SCENE, _NOISE, _QUESTIONS = range(3)  # generators of an image
_BATCH = 16


class Examples(NamedTuple):
    """B images with questions.

    Attributes:
        images: [B, 3, 80, 80] uint8.
        maps: [B, 80, 80] uint8, what each pixel shows; see `mmaccel.demo.scenes_vqa.render`.
        questions: of each image.
    """

    scenes: list[BusyScene]
    images: Tensor
    maps: Tensor
    questions: list[list[Question]]


def make_examples(
    seed: int, indices: Iterable[int], per_kind: int | Mapping[str, int] = 1
) -> Examples:
    """Images with at most `per_kind` questions of each kind, or a number a kind; 0 asks nothing."""
    indices = list(indices)
    scenes = [draw_scene(generator(seed, k, _SCENE)) for k in indices]
    noises = [draw_noise(generator(seed, k, _NOISE), side=CANVAS) for k in indices]
    return Examples(scenes, *render(scenes, noises), make_questions(seed, indices, per_kind))


def make_questions(
    seed: int, indices: Iterable[int], per_kind: int | Mapping[str, int] = 1
) -> list[list[Question]]:
    """The questions alone (the same as `make_examples` gives, without drawing)."""
    return [
        ask(generator(seed, k, _QUESTIONS), draw_scene(generator(seed, k, _SCENE)), per_kind)
        for k in indices
    ]


def list_questions(per_kind: int, seed: int = EVALUATION_SEED) -> Iterator[tuple[Tensor, Question]]:
    """Images [3, 80, 80] uint8 with one question each, `per_kind` of each kind, scene by scene."""
    left = dict.fromkeys(KINDS, per_kind)
    first = 0
    while any(left.values()):
        examples = make_examples(seed, range(first, first + _BATCH))
        for image, questions in zip(examples.images, examples.questions, strict=True):
            for question in questions:
                if left[question.kind]:
                    left[question.kind] -= 1
                    yield image, question
        first += _BATCH
