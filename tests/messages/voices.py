"""`voices`: texts and folders that are refused before any pass."""

from __future__ import annotations

import json
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
from mmaccel.pipelines.text_to_speech.types import SpeechRequest
from mmaccel.tokenizers_vq.speech_codec import (
    SpeechCodec,
    SpeechCodecConfig,
    save_codec,
)
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


def _serve(text: str) -> Callable[[], Any]:
    def call() -> Any:
        pipe = _pipe()
        window: Any = pipe.speech.window
        with no_pass_of(window.model):
            return pipe.serve(
                [SpeechRequest(text, 0)], max_seconds=1.0, rows=1, deliver=lambda *_: None
            )

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


def _facts(**facts: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / "voices.json"
        found = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(found | facts), encoding="utf-8")

    return change


def _codec(**config: Any) -> Change:
    def write(folder: Path) -> None:
        torch.manual_seed(0)
        own = SpeechCodecConfig(**TINY_CODEC | config)
        save_codec(SpeechCodec(own), folder, torch.float32)

    return write


def _config(**config: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / "codec.json"
        found = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(found | config), encoding="utf-8")

    return change


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
        "a word like no other",
        _say("zzzz"),
        ("'zzzz'", "they are in its voices.json"),
    ),
    Refused(
        "chunks of no length",
        lambda: _pipe().stream("red", chunk_seconds=0),
        ("chunk_seconds: expected a number in 0..3600", "received 0", "0.5 suits"),
    ),
    Refused(
        "a stream of several seeds",
        lambda: _pipe().stream("red", seed=[1]),
        ("seed: expected one integer", "received [1]", "write 0"),
    ),
    Refused(
        "a method of caches over several parts",
        lambda: _pipe().stream("red. " * 6, kv_cache="snapkv"),
        ("kv_cache: expected a text that the model says at once", "one of 6 parts", "stream each"),
    ),
    Refused("a stream of no text", lambda: _pipe().stream(" "), ("expected text to say",)),
    Refused("a row of ten thousand words", _row(prompt="red " * 10_000), ("20000 characters",)),
    Refused(
        "a row of four thousand words",
        _row(prompt="red " * 4000),
        ("text: expected at most 200 parts of 5 words", "received 800"),
    ),
    Refused("a row of signs", _row(prompt="?!"), ("text: expected words", "'?!'")),
    Refused("a row's voice", _row(voice="zoe"), ("voice: expected one of ada, ben", "'zoe'")),
    Refused("a row's size", _row(size=64), ("size: expected none for utterances", "64x64")),
    Refused("a row's negative", _row(negative="blue"), ("negative: expected none for utterances",)),
    Refused("a row's guidance", _row(guidance_scale=2), ("guidance_scale: expected none",)),
    Refused(
        "a voice for images",
        lambda: Images(model="scenes").plan(
            Item(check_row({"prompt": "red", "voice": "ada"}), 0, 0), None
        ),
        ("voice: expected none for images", "'ada'"),
    ),
    Refused("a row's field", _row(params={"steps": 3}), ("steps",)),
    Refused("an empty text", _say("  "), ("expected text to say", "write one")),
    Refused("signs alone", _say("?!"), ("text: expected words", "'?!'", "write one")),
    Refused("no text", _say(7), ("text: expected a text or a list of them", "received 7")),
    Refused(
        "ten thousand words",
        _say("red " * 10_000),
        ("text: expected at most 200 parts of 5 words", "received 2000", "write several texts"),
    ),
    Refused(
        "a long text among requests that are served together",
        _serve("red " * 6),
        ("text: expected at most 5 words", "received 6", "a text of its own"),
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
    Refused(
        "a codec of more codes",
        _changed(_nothing, _codec(levels=[2, 2, 4])),
        ("codec: expected 8 codes", "received one of 16", "give the model's codec"),
        UnsupportedModelError,
    ),
    Refused(
        "a codec of fewer codes",
        _changed(_nothing, _codec(levels=[2, 2])),
        ("codec: expected 8 codes", "received one of 4", "give the model's codec"),
        UnsupportedModelError,
    ),
    Refused(
        "no words",
        _changed(_facts(words={})),
        ("model: expected words in", "received {}"),
        UnsupportedModelError,
    ),
)
