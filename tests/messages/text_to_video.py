"""Clips from prompts: calls, requests and checkpoints that are refused before any pass."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import mmaccel
from mmaccel import TextToImage, TextToVideo
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.text_to_video import registry
from tests.fixtures.tiny_model import build_tiny, build_tiny_clips
from tests.messages.case import Refused

PROMPT = "a red circle"


@cache
def _home() -> Any:
    return tempfile.TemporaryDirectory()  # which Python removes at its end


@cache
def _folder(name: str) -> Path:
    folder = Path(_home().name) / name
    folder.mkdir()
    return build_tiny(folder) if name == "images" else build_tiny_clips(folder)


@cache
def _pipe() -> TextToVideo:
    return TextToVideo.from_pretrained(_folder("clips"))


def _call(prompt: Any = PROMPT, **options: Any) -> Callable[[], Any]:
    """A call that must be refused before any pass."""

    def call() -> Any:
        def fail(progress: Any) -> None:
            raise AssertionError("a pass was made")

        _pipe()(prompt, **{"on_step": fail, **options})

    return call


def _arguments(*rows: tuple[dict[str, Any], str]) -> list[Refused]:
    """Rows of arguments of a call, and what the refusal says."""
    return [
        Refused(f"{options}"[:120], _call(**options), says=tuple(said.split(" … ")))
        for options, said in rows
    ]


def _without_weights() -> Any:
    with patch.object(registry, "find_demos", dict):
        TextToVideo.from_pretrained("moving-scenes")


def _with_words(**changes: Any) -> Callable[[], Any]:
    """A model whose `words.json` says something else."""

    def call() -> Any:
        folder = build_tiny_clips(Path(tempfile.mkdtemp(dir=_home().name)))
        said = json.loads((folder / "words.json").read_text(encoding="utf-8"))
        (folder / "words.json").write_text(json.dumps(said | changes), encoding="utf-8")
        TextToVideo.from_pretrained(folder)

    return call


CASES = (
    *_arguments(
        ({"prompt": "a rad circle"}, "received 'rad' (nearest: 'red'); it knows: a red blue"),
        ({"prompt": "a dragon"}, "received 'dragon'; it knows … write with these"),
        ({"prompt": "q r s t u v w"}, "'q', 'r', 's', 't', 'u' and 2 more; it knows"),
        ({"prompt": "x" * 9000}, "x… … it knows: a red blue"),
        ({"prompt": ""}, "at least one word"),
        ({"prompt": []}, "prompt: expected a prompt or a list"),
        ({"prompt": " ".join(["a"] * 10_000)}, "at most 12 words, received 10000; shorten"),
        ({"prompt": " ".join(["x"] * 10_000)}, "at most 12 words, received 10000; shorten"),
        ({"policy": mmaccel.Stepwise()}, "such as mmaccel.Jacobi(window=32)"),
        ({"seed": [1, 2]}, "seed: expected an integer or 1"),
        ({"seed": 1.5}, "seed: expected an integer or one per row, received 1.5"),
        ({"num_videos_per_prompt": 0}, "num_videos_per_prompt: expected an integer"),
        ({"batch_size": 0}, "batch_size: expected an integer >= 1"),
        ({"temperature": -1.0}, "temperature: expected a finite number >= 0"),
        ({"negative_prompt": "blue", "guidance_scale": 1}, "guidance_scale other than 1 with it"),
        ({"negative_prompt": ["red", "blue"]}, "negative prompt: expected a text for all"),
        ({"start": "a.png"}, "start: expected an image, a list of images or a tensor"),
        ({"start": []}, "start: expected an image, a list of images or a tensor"),
        ({"start": torch.full((1, 8, 8, 3), 2.0)}, "start: expected floats in 0..1"),
        ({"deliver": 3}, "deliver: expected a function"),
        ({"on_step": 3}, "on_step: expected a function"),
    ),
    Refused(
        "the demo model without its weights",
        _without_weights,
        says=(
            "moving-scenes, received none",
            "trains them",
            "scripts.training moving-scenes` trains them",
        ),
    ),
    *(
        Refused(
            f"the demo model of clips, for {pipeline.__name__}",
            partial(pipeline.from_pretrained, "moving-scenes"),
            says=("received moving-scenes, which makes clips from prompts", "mmaccel animate"),
        )
        for pipeline in (TextToImage, mmaccel.TextToSpeech, mmaccel.ImageToVideo)
    ),
    Refused(
        "a model of images",
        lambda: TextToVideo.from_pretrained(_folder("images")),
        says=("makes clips from prompts (TextToVideo)", "makes images", "mmaccel generate"),
    ),
    Refused(
        "a model of clips for images",
        lambda: TextToImage.from_pretrained(_folder("clips")),
        says=("makes images", "which makes clips from prompts (TextToVideo)", "mmaccel animate"),
    ),
    Refused(
        "a folder of something else",
        lambda: TextToVideo.from_pretrained(tempfile.mkdtemp(dir=_home().name)),
        says=("expected words.json with n_frames and fps", "mmaccel.ImageToVideo"),
        error=UnsupportedModelError,
    ),
    Refused(
        "another family",
        lambda: TextToVideo.from_pretrained(_folder("clips"), family="cosmos"),
        says=("family: expected one of words, received 'cosmos'",),
        error=OptionError,
    ),
    Refused(
        "no frames",
        _with_words(n_frames=0),
        says=("n_frames in", "an integer in 1..4096", "received 0"),
        error=UnsupportedModelError,
    ),
    Refused(
        "frames a second that are none",
        _with_words(fps=[]),
        says=("fps", "received []"),
        error=UnsupportedModelError,
    ),
    Refused(
        "more frames than positions",
        _with_words(n_frames=40),
        says=("expected at most 62 positions", "for 40 frames (words.json)"),
        error=UnsupportedModelError,
    ),
)
