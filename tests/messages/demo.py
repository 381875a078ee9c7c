"""Captions, questions and folders of the embedded models, and training of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import mmaccel
from mmaccel.demo.features import SceneFeatures
from mmaccel.demo.scenes.data import read_caption
from mmaccel.errors import ShapeError
from mmaccel.pipelines.models.scenes_vocabulary import CaptionWords
from tests.messages.case import Refused

_WORDS = CaptionWords(n_image_tokens=10, words=("a", "red", "circle"), max_words=4)
_NO_SENTENCES = (
    "on grass", "a circle", "a red circle a blue square", "a red circle above", "a dog",
)  # fmt: skip


def _load_empty() -> None:
    with TemporaryDirectory() as folder:
        mmaccel.load_demo("scenes-vqa", Path(folder))


CASES = (
    *(
        Refused(f"the caption {caption!r}", partial(read_caption, caption), says=("caption",))
        for caption in _NO_SENTENCES
    ),
    Refused(
        "an unknown word",
        lambda: _WORDS.encode("a blue dog"),
        says=("'blue'", "it knows: a red circle"),
    ),
    Refused(
        "images of another size",
        lambda: SceneFeatures()(torch.zeros(1, 3, 32, 32)),
        says=("[B, 3, 64, 64]", "[1, 3, 32, 32]"),
        error=ShapeError,
    ),
    Refused("another model", lambda: mmaccel.load_demo("scenes"), says=("scenes-vqa",)),
    Refused("an empty folder", _load_empty, says=("scripts.training scenes-vqa",)),
)
