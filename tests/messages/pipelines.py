"""Arguments of the pipelines: texts, images, starts, seeds, numbers, callbacks, files."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from PIL import Image

import mmaccel
from mmaccel import ImageToText, SamplingParams, UnsupportedModelError
from mmaccel.demo.scenes_vqa.processor import make_processor
from mmaccel.errors import ShapeError
from tests.fixtures.media import MEDIA, MediaCase, image, open_media
from tests.fixtures.passes import no_pass_of
from tests.fixtures.shared import (
    image_pipe,
    media_folders,
    media_pipe,
    new_folder,
    reading_pipe,
)
from tests.fixtures.speech import FAMILIES
from tests.fixtures.tiny_lms import shared_lm
from tests.fixtures.tiny_model import CAPTIONS
from tests.fixtures.tiny_vqa import build_vqa, scene
from tests.messages.case import Refused

Call = Callable[[], Any]


# ------------------------------------------------------------------------------ speech and video


def _media(kind: str, **options: Any) -> Call:
    """A call of a speech or video pipeline, before its first pass."""

    def call() -> Any:
        case = MediaCase(kind, media_folders(kind), media_pipe(kind))
        with no_pass_of(case.hidden):
            return case.call(**{"seed": 0, "index": 0} | options)

    return call


def _say(family: str, text: Any = "a red fox", **options: Any) -> Call:
    def call() -> Any:
        pipe = media_pipe(family)
        with no_pass_of(pipe.speech.window.model):
            return pipe(text, **options)

    return call


def _start(start: Any) -> Call:
    def call() -> Any:
        pipe = media_pipe("cosmos")
        with no_pass_of(pipe.model.model):
            return pipe(start)

    return call


def _serve(**options: Any) -> Call:
    return lambda: media_pipe("cosmos").serve(image(), **options)


def _reopen(kind: str, model: bool = True, codec: bool = True, **options: Any) -> Call:
    def call() -> Any:
        folders = media_folders(kind)
        none = folders[0].parent / "none"
        return open_media(
            kind, (folders[0] if model else none, folders[1] if codec else none), **options
        )

    return call


_MEDIA = tuple(
    Refused(f"{kind}: {next(iter(options))}={next(iter(options.values()))!r}",
            _media(kind, **options), says)
    for kind in MEDIA
    for options, says in (
        (dict(temprature=1), (": expected options out of", "did you mean temperature?")),
        (dict(policy=mmaccel.LosslessUnmask()),
         ("policy: expected a policy such as mmaccel.Jacobi",)),
    )
)  # fmt: skip
_MEDIA_FILES = tuple(
    Refused(f"{kind}: {name}", _reopen(kind, **options), (says,))
    for kind in MEDIA
    for name, options, says in (
        ("no model", dict(model=False), "model: expected a folder"),
        ("no codec", dict(codec=False), "codec: expected a folder, a file, an id of the Hugg"),
    )
)
_SPEECH = tuple(
    Refused(f"{family}: {name}", _say(family, **options), says)
    for family in FAMILIES
    for name, options, says in (
        ("blanks", dict(text="  "), ("prompt: expected text to say, received '  '",)),
        ("a control token", dict(text="say <|eot_id|> twice"), ("expected words", "<|eot_id|>")),
        ("ten thousand words", dict(text="fox " * 10_000),
         ("positions: expected at most 160", "of the prompt", "shorten the text")),
        ("half a character", dict(text=["a fox", "a \ud800 fox"]),
         (r"received '\ud800' at position 2; write it",)),
        ("a voice that is none", dict(voice="tara: or <|eot_id|>"), ("voice: expected",)),
    )
)  # fmt: skip
_VOICES = (
    Refused("a voice for Llasa", _say("llasa", voice="tara"), ("voice: expected none for Llasa",)),
    Refused("the voice a:b", _say("orpheus", voice="a:b"),
            ("voice: expected a name such as tara, leah",)),
)  # fmt: skip
_DEPTHS = "expected 8 or 16 bits a channel"
_STARTS = tuple(
    Refused(f"a clip that starts with {name}", _start(start), says)
    for name, start, says in (
        ("floats of Pillow", Image.new("F", (5, 5)), (_DEPTHS, "mode 'F'")),
        ("nothing", None, ("received NoneType 'None'; open it",)),
        ("a file's name", "clip.mp4", ("received str 'clip.mp4'",)),
        ("1.5", torch.full((1, 4, 4, 3), 1.5), ("expected floats in 0..1, received 1.5..1.5",)),
    )
)
_SERVED = (
    Refused("serving with guidance",
            _serve(params=SamplingParams(guidance_scale=2.0), deliver=print),
            ("guidance_scale: expected 1, ", "received 2.0")),
)  # fmt: skip


def _animate(prompt: Any) -> Call:
    def call() -> Any:
        pipe = reading_pipe()
        with no_pass_of(pipe.model.model):
            return pipe(image(), prompt=prompt)

    return call


_MORE = "fox " * 513
_READING = (
    Refused("a clip without the prompt that the model needs", _animate(None),
            ("prompt: expected what happens in the clip, received None; write one",)),
    Refused("a clip of 513 words", _animate(_MORE), ("expected at most 512 tokens, received 513",)),
    Refused("a prompt for a model that reads none",
            lambda: media_pipe("cosmos")(image(), prompt="a fox runs"),
            ("prompt: expected none with a model that reads no text, received 'a fox runs'",
             "take nvidia/Cosmos-Predict1-5B-Video2World")),
)  # fmt: skip


# ------------------------------------------------------------------------------ questions


@cache
def _vqa() -> ImageToText:
    return ImageToText(build_vqa(), make_processor())


@cache
def _files() -> Any:
    """A folder with a text, a cut image, a model without a processor and a model of text."""
    folder = new_folder("questions")
    (folder / "words.txt").write_text("no image", encoding="utf-8")
    scene().save(folder / "whole.png")
    (folder / "cut.png").write_bytes((folder / "whole.png").read_bytes()[:200])
    build_vqa().save_pretrained(folder / "alone")
    shared_lm("llama").save_pretrained(folder / "lm")
    return folder


def _ask(images: Any = None, question: Any = "what?", **options: Any) -> Call:
    def call() -> Any:
        pipe = _vqa()
        named = isinstance(images, str) and images.endswith((".png", ".txt"))
        given = _files() / images if named else images
        with no_pass_of(pipe.model):
            return pipe(scene() if images is None else given, question, **options)

    return call


def _vqa_with(method: Any) -> Call:
    """Opening the pipeline with a reducer, which leaves nothing attached."""

    def call() -> Any:
        model = _vqa().model
        try:
            return ImageToText(model, make_processor(), visual_tokens=method)
        finally:
            assert not mmaccel.detach(model)

    return call


def _open_vqa(name: str, **options: Any) -> Call:
    return lambda: ImageToText.from_pretrained(_files() / name, **options)


_QUESTIONS = tuple(
    Refused(f"a question with {name}", call, says)
    for name, call, says in (
        ("a file that is not there", _ask("none.png"), ("image: expected a file", "none.png'")),
        ("no words", _ask(question=""), ("prompt: expected a question, received ''",)),
        ("two images named", _ask(question="is <image> <image> red?"),
         ("images: expected 2, one for each <image>",)),
        ("5000 tokens", _ask(max_new_tokens=5000), ("positions: expected at most 2048",)),
        ("revival under Jacobi", _vqa_with(mmaccel.LazyLLM(keep=0.5)),
         ("expected no drafts", "LazyLLM", "Autoregressive()")),
    )
)  # fmt: skip
_NO_READERS = tuple(
    Refused(f"questions to {name}", call, says, UnsupportedModelError)
    for name, call, says in (
        ("frames of an image", _vqa_with(mmaccel.VidCom2(keep=0.5)), ("received a LlavaNext",)),
        ("a model without a processor", _open_vqa("alone"), ("rocessor",)),
    )
)  # fmt: skip


# ------------------------------------------------------------------------------ images


def _draw(**options: Any) -> Call:
    return lambda: image_pipe("words")(CAPTIONS[:1], **options)


_IMAGES = (
    *(
        Refused(f"on_step returns {returned!r}", _draw(on_step=lambda _, given=returned: given),
                ("on_step: expected None or whole lengths [1] in return",), ShapeError)
        for returned in ([1], torch.zeros(2).long())
    ),
)  # fmt: skip

CASES = (
    *_MEDIA, *_MEDIA_FILES, *_SPEECH, *_VOICES, *_STARTS, *_SERVED, *_READING, *_QUESTIONS,
    *_NO_READERS, *_IMAGES,
)  # fmt: skip
