"""The kinds of runs over tiny models: a loader, a node that makes something, their inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmaccel import ImageToText, ImageToVideo, TextToImage, TextToSpeech, TextToVideo
from mmaccel.comfy.loading import LoadedModel
from tests.comfy.fake_comfy import run
from tests.fixtures.media import build_media, image
from tests.fixtures.speech import TEXTS
from tests.fixtures.tiny_model import CAPTIONS, N_FRAMES, N_TOKENS, build_tiny, build_tiny_clips
from tests.fixtures.tiny_vqa import QUESTION, save_vqa, scene

KINDS = ["Images", "Speech", "TextToVideo", "Video", "Vision"]
N_NEW = 6
QUESTIONS = f"{QUESTION}\n\nhow many stars are there?"
START = torch.from_numpy(np.asarray(image()).copy())[None].float() / 255


def scenes(*indices: int) -> Tensor:
    """`[B, 80, 80, 3]`, as ComfyUI has images."""
    pixels = np.stack([np.asarray(scene(k)) for k in indices])
    return torch.from_numpy(pixels).float() / 255


@dataclass(frozen=True)
class Kind:
    """A loader and a node that runs its models.

    Attributes:
        loader, node: ids without the prefix.
        link: the input that takes the loaded model.
        pipeline: class that the loader opens.
        parts: widgets of the loader.
        inputs: of the node.
        rows: of what these inputs make.
        tokens: of all rows at most.
        content: samples, pixels or letters of the node's outputs.
    """

    word: str
    loader: str
    node: str
    link: str
    pipeline: Any
    parts: dict[str, Path]
    inputs: dict[str, Any]
    rows: int
    tokens: int
    content: Callable[[tuple[Any, ...]], Tensor]

    @cached_property
    def model(self) -> LoadedModel:
        """The loaded model, which stays loaded."""
        return self.load()

    def load(self, **values: Any) -> LoadedModel:
        """The loaded model; paths are given as file managers copy them."""
        own = {name: f' "{path}"\n' for name, path in self.parts.items()}
        opened: LoadedModel = run(self.loader, **(own | values))[0]
        return opened

    def make(self, **values: Any) -> tuple[Any, ...]:
        """The node's outputs."""
        return run(self.node, **({self.link: self.model} | self.inputs | values))


def build_kind(word: str, folder: Path) -> Kind:
    """A kind with models of its own below a folder."""
    if word == "Images":
        inputs = dict(prompt="\n".join(CAPTIONS[:2]), seed=7)
        parts = {"model": build_tiny(folder)}
        return Kind(
            word, "LoadModel", "GenerateImage", "model", TextToImage, parts, inputs,
            rows=2, tokens=2 * N_TOKENS, content=lambda values: values[0],
        )  # fmt: skip
    if word == "Speech":
        parts = dict(zip(("model", "codec"), build_media("llasa", folder)))
        inputs = dict(text="\n".join(TEXTS), seed=3, max_seconds=0.02)
        return Kind(
            word, "LoadSpeechModel", "GenerateSpeech", "speech_model", TextToSpeech, parts, inputs,
            rows=3, tokens=3 * 17, content=lambda values: values[0]["waveform"],
        )  # fmt: skip
    if word == "TextToVideo":
        parts, inputs = {"model": build_tiny_clips(folder)}, dict(prompt=CAPTIONS[1], seed=7)
        return Kind(
            word, "LoadTextToVideoModel", "TextToVideo", "text_to_video_model", TextToVideo, parts,
            inputs, rows=1, tokens=N_FRAMES * N_TOKENS, content=lambda values: values[1],
        )  # fmt: skip
    if word == "Video":
        parts = dict(zip(("model", "codec"), build_media("cosmos", folder)))
        return Kind(
            word, "LoadVideoModel", "GenerateVideo", "video_model", ImageToVideo, parts,
            dict(start=START, seed=7), rows=1, tokens=12, content=lambda values: values[1],
        )  # fmt: skip
    return Kind(
        word, "LoadVisionModel", "AnswerQuestion", "vision_model", ImageToText,
        {"model": save_vqa(folder)}, dict(image=scenes(0), question=QUESTIONS, max_tokens=N_NEW),
        rows=2, tokens=2 * N_NEW,
        content=lambda values: torch.tensor([ord(letter) for letter in values[0]]),
    )  # fmt: skip
