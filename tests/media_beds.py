"""Tiny speech and video models behind one face, for tests of what both pipelines share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mmaccel import ImageToVideo, TextToSpeech
from tests.speech_beds import FAMILIES, SECONDS, TEXTS, build_speech
from tests.video_beds import build_video

MEDIA = (*FAMILIES, "cosmos")


def picture(seed: int = 0, size: tuple[int, int] = (48, 32)) -> Image.Image:
    """Noise."""
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(values)


@dataclass
class MediaBed:
    """A pipeline on tiny weights.

    Attributes:
        kind: one of `MEDIA`.
        folders: of model and codec.
        pipe: the pipeline.
    """

    kind: str
    folders: tuple[Path, Path]
    pipe: Any

    @property
    def speaks(self) -> bool:
        """Whether payloads are utterances."""
        return self.kind in FAMILIES

    def call(self, seed: Any = 0, index: int | None = None, **options: Any) -> Any:
        """One payload for each seed: text k for seed k, or text `index` alone."""
        if not self.speaks:
            return self.pipe(picture(), seed=seed, **options)
        n = len(seed) if isinstance(seed, Sequence) else 1
        texts = [TEXTS[k % len(TEXTS)] for k in range(n)] if index is None else [TEXTS[index]]
        return self.pipe(texts, seed=seed, **{"max_seconds": SECONDS[self.kind]} | options)

    @property
    def hidden(self) -> Any:
        """The module that predicts tokens, for hooks."""
        return self.pipe.model.model


def build_media(kind: str, folder: Path) -> tuple[Path, Path]:
    """Write a model and its codec; the paths of both."""
    return build_speech(kind, folder) if kind in FAMILIES else build_video(folder)


def open_media(kind: str, folders: tuple[Path, Path], **options: Any) -> Any:
    """The pipeline over `build_media`'s files."""
    pipeline: Any = TextToSpeech if kind in FAMILIES else ImageToVideo
    return pipeline.from_pretrained(folders[0], codec=folders[1], **options)


def content(made: Any) -> torch.Tensor:
    """Samples of an utterance, or pixels of a clip."""
    values: torch.Tensor = made.frames if hasattr(made, "frames") else made.waveform
    return values


def payloads(made: Any) -> list[Any]:
    """The payloads that a pipeline returned."""
    return [made[k] for k in range(len(made))]
