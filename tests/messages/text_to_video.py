"""Clips from prompts: calls, requests and checkpoints that are refused before any pass."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import mmaccel
from mmaccel import TextToImage, TextToVideo
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


CASES = (
    *_arguments(
        ({"prompt": "a rad circle"}, "received 'rad' (nearest: 'red'); it knows: a red blue"),
        ({"prompt": "x" * 9000}, "x… … it knows: a red blue"),
        ({"prompt": " ".join(["a"] * 10_000)}, "at most 12 words, received 10000; shorten"),
        ({"negative_prompt": "blue", "guidance_scale": 1}, "guidance_scale other than 1 with it"),
        ({"start": "a.png"}, "start: expected an image, a list of images or a tensor"),
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
)
