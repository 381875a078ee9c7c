"""`voices`: texts and folders that are refused before any pass."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from mmaccel import TextToSpeech
from mmaccel.batch.modalities import Images, Speech
from mmaccel.batch.prompts import Item, check_row
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.models import speech_tokens
from mmaccel.pipelines.text_to_speech import registry
from mmaccel.tokenizers_vq.speech_codec import SpeechCodec, SpeechCodecConfig, save_codec
from tests.fixtures.passes import no_pass_of
from tests.fixtures.shared import new_folder
from tests.fixtures.voices import TINY_CODEC, build_voices
from tests.messages.case import Refused

Change = Callable[[Path], object]


@cache
def _folder() -> Path:
    return build_voices(new_folder("voices"))


@cache
def _pipe() -> TextToSpeech:
    return TextToSpeech.from_pretrained(_folder())


def _say(text: Any, **options: Any) -> Callable[[], Any]:
    def call() -> Any:
        pipe = _pipe()
        window: Any = pipe.speech.window
        with no_pass_of(window.model):
            return pipe(text, **options)

    return call


def _row(**fields: Any) -> Callable[[], Any]:
    """A row of a prompt file."""

    def call() -> Any:
        speech, pipe = Speech(model="voices"), _pipe()
        item = Item(check_row({"prompt": "red", **fields}), 0, 0)
        return speech.plan(item, speech.resize(pipe, item.row.size) if item.row.size else pipe)

    return call


def _changed(change: Change, codec: Change | None = None) -> Callable[[], Any]:
    """Opening a copy of the folder, with a codec of a folder of its own where `codec` is given."""

    def call() -> Any:
        folder = shutil.copytree(_folder(), new_folder("copy") / "voices")
        change(folder)
        other = None
        if codec is not None:
            other = new_folder("codec") / "codec"
            codec(other)
        with mock.patch.object(speech_tokens, "check_windows"):
            return TextToSpeech.from_pretrained(folder, codec=other)

    return call


def _nothing(_: Path) -> None:
    pass


def _codec(**config: Any) -> Change:
    def write(folder: Path) -> None:
        torch.manual_seed(0)
        own = SpeechCodecConfig(**TINY_CODEC | config)
        save_codec(SpeechCodec(own), folder, torch.float32)

    return write


def _untrained() -> Any:
    with mock.patch.object(registry, "DEMO_WEIGHTS", new_folder("empty")):
        return TextToSpeech.from_pretrained("voices")


CASES = (
    Refused(
        "a word that the model does not know",
        _say("a red foxx"),
        ("text: expected words that the model knows (6)", "'foxx'", "did you mean fox?"),
    ),
    Refused(
        "a method of caches over several parts",
        lambda: _pipe().stream("red. " * 6, kv_cache="snapkv"),
        ("kv_cache: expected a text that the model says at once", "one of 6 parts", "stream each"),
    ),
    Refused("a row's voice", _row(voice="zoe"), ("voice: expected one of ada, ben", "'zoe'")),
    Refused(
        "a voice for images",
        lambda: Images(model="scenes").plan(
            Item(check_row({"prompt": "red", "voice": "ada"}), 0, 0), None
        ),
        ("voice: expected none for images", "'ada'"),
    ),
    Refused(
        "ten thousand words",
        _say("red " * 10_000),
        ("text: expected at most 200 parts of 5 words", "received 2000", "write several texts"),
    ),
    Refused(
        "an unknown voice",
        _say("red", voice="zoe"),
        ("voice: expected one of ada, ben", "'zoe'", "leave it out for ada"),
    ),
    Refused(
        "weights that are not there",
        _untrained,
        ("model: expected the weights of voices", "python -m scripts.training voices"),
    ),
    Refused(
        "a codec of another rate",
        _changed(_nothing, _codec(sample_rate=24_000)),
        ("codec: expected 16000 Hz", "received 24000 Hz", "give the model's codec"),
        UnsupportedModelError,
    ),
)
