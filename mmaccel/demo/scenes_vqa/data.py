"""Busy scenes: image `index` of `seed`, its map and its questions.

Training, validation and evaluation draw from different seeds, so they share no image.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from mmaccel.demo.scenes_vqa.layout import BusyScene, draw_scene, stream
from mmaccel.demo.scenes_vqa.questions import KINDS, Question, ask
from mmaccel.demo.scenes_vqa.render import draw_noise, render

TRAIN_SEED = 21
VALIDATION_SEED = 22
EVALUATION_SEED = 23
_SCENE = 0
_NOISE = 1
_QUESTIONS = 2


@dataclass(frozen=True)
class Examples:
    """A batch of images with questions.

    Attributes:
        scenes: B descriptions.
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
    """Makes images with questions.

    Args:
        seed: which collection.
        indices: which images of it.
        per_kind: most questions of each kind, or a number a kind; 0 asks nothing.

    Returns:
        Examples. Those for an index do not depend on the others.
    """
    indices = list(indices)
    scenes = [draw_scene(stream(seed, k, _SCENE)) for k in indices]
    images, maps = render(scenes, [draw_noise(stream(seed, k, _NOISE)) for k in indices])
    questions = make_questions(seed, indices, per_kind, scenes)
    return Examples(scenes, images, maps, questions)


def make_questions(
    seed: int,
    indices: Iterable[int],
    per_kind: int | Mapping[str, int] = 1,
    scenes: list[BusyScene] | None = None,
) -> list[list[Question]]:
    """The questions alone (the same as `make_examples` gives, without drawing)."""
    indices = list(indices)
    scenes = scenes or [draw_scene(stream(seed, k, _SCENE)) for k in indices]
    return [
        ask(stream(seed, k, _QUESTIONS), scene, per_kind)
        for k, scene in zip(indices, scenes, strict=True)
    ]


def list_questions(per_kind: int, seed: int = EVALUATION_SEED) -> Iterator[tuple[Tensor, Question]]:
    """Images [3, 80, 80] uint8 with one question each, `per_kind` of each kind, scene by scene."""
    left = dict.fromkeys(KINDS, per_kind)
    first = 0
    while any(left.values()):
        examples = make_examples(seed, range(first, first + 16), per_kind=1)
        for image, questions in zip(examples.images, examples.questions, strict=True):
            for question in questions:
                if left[question.kind]:
                    left[question.kind] -= 1
                    yield image, question
        first += 16
