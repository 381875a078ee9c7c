"""The kinds of runs over tiny models: a loader, a node that makes something, their inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmaccel import ImageToText, ImageToVideo, TextToImage, TextToSpeech, TextToVideo
from mmaccel.comfy.loading import LoadedModel
from tests.comfy.fake_comfy import Host, run
from tests.fixtures.media import build_media, image
from tests.fixtures.speech import TEXTS
from tests.fixtures.tiny_model import CAPTIONS, N_FRAMES, N_TOKENS, build_tiny_clips
from tests.fixtures.tiny_vqa import QUESTION, save_vqa, scene

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
        word: of the loader's id.
        node: id without the prefix.
        socket: the input that takes the loaded model.
        pipeline: class that the loader opens.
        parts: widgets of the loader.
        inputs: of the node; as many payloads as `rows`.
        tokens: of all payloads at most.
        outputs: kinds of the node's sockets.
        content: samples, pixels or letters of the node's outputs.
        prefills: passes over prompts that give no token.
    """

    word: str
    node: str
    socket: str
    pipeline: Any
    parts: dict[str, Path]
    inputs: dict[str, Any]
    rows: int
    tokens: int
    outputs: list[str]
    content: Callable[[tuple[Any, ...]], Tensor] = field(default=lambda values: values[0])
    prefills: int = 1

    @property
    def loader(self) -> str:
        """Id without the prefix."""
        return f"Load{self.word}Model"

    def load(self, host: Host | None = None, **values: Any) -> LoadedModel:
        """The loaded model; paths are given as file managers copy them."""
        own = {name: f' "{path}"\n' for name, path in self.parts.items()}
        opened: LoadedModel = run(self.loader, host, **(own | values)).values[0]
        return opened

    def make(self, model: LoadedModel, host: Host | None = None, **values: Any) -> tuple[Any, ...]:
        """The node's outputs."""
        return run(self.node, host, **({self.socket: model} | self.inputs | values)).values

    def hidden(self, model: LoadedModel) -> Any:
        """The module that predicts tokens, for hooks."""
        pipe = model.pipe
        return pipe.model.get_decoder() if self.word == "Vision" else pipe.model.model

    def weights(self) -> Path:
        """A file of the part that is named last."""
        folder = list(self.parts.values())[-1]
        return next(f for f in folder.iterdir() if f.suffix in (".safetensors", ".jit"))


def build_images(folder: Path) -> Kind:
    """Images of the tiny model in a folder."""
    inputs = dict(prompt="\n".join(CAPTIONS[:2]), seed=7)
    kinds = ["IMAGE", "MMACCEL_STATS"]
    return Kind(
        "", "GenerateImage", "model", TextToImage, {"model": folder}, inputs, 2, 2 * N_TOKENS, kinds
    )


def build_kind(word: str, folder: Path) -> Kind:
    """The kind of a loader's word, with models of its own below a folder."""
    if word == "Speech":
        model, codec = build_media("llasa", folder)
        inputs = dict(text="\n".join(TEXTS), seed=3, max_seconds=0.02)
        return Kind(
            word,
            "GenerateSpeech",
            "speech_model",
            TextToSpeech,
            {"model": model, "codec": codec},
            inputs,
            rows=3,
            tokens=3 * 17,
            outputs=["AUDIO", "MMACCEL_STATS"],
            content=lambda values: values[0]["waveform"],
        )
    if word == "TextToVideo":
        return Kind(
            word,
            "TextToVideo",
            "text_to_video_model",
            TextToVideo,
            {"model": build_tiny_clips(folder)},
            dict(prompt=CAPTIONS[1], seed=7),
            rows=1,
            tokens=N_FRAMES * N_TOKENS,
            outputs=["VIDEO", "IMAGE", "MMACCEL_STATS"],
            content=lambda values: values[1],
        )
    if word == "Video":
        model, codec = build_media("cosmos", folder)
        return Kind(
            word,
            "GenerateVideo",
            "video_model",
            ImageToVideo,
            {"model": model, "codec": codec},
            dict(start=START, seed=7),
            rows=1,
            tokens=12,
            outputs=["VIDEO", "IMAGE", "MMACCEL_STATS"],
            content=lambda values: values[1],
        )
    inputs = dict(image=scenes(0), question=QUESTIONS, max_tokens=N_NEW)
    return Kind(
        word,
        "AnswerQuestion",
        "vision_model",
        ImageToText,
        {"model": save_vqa(folder)},
        inputs,
        rows=2,
        tokens=2 * N_NEW,
        outputs=["STRING", "IMAGE", "MMACCEL_STATS"],
        content=lambda values: torch.tensor([ord(letter) for letter in values[0]]),
        prefills=0,
    )
