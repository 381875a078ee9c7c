"""Arguments of the pipelines: texts, images, starts, seeds, numbers, callbacks, files."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image

import mmaccel
from mmaccel import ImageToText, SamplingParams, TextToImage, UnsupportedModelError
from mmaccel.demo.scenes_vqa.processor import make_processor
from mmaccel.errors import ShapeError
from mmaccel.pipelines.image_to_text.prompts import read_image
from mmaccel.pipelines.loading.checkpoint import check_prompt
from tests.fixtures.media import MEDIA, MediaCase, image, open_media
from tests.fixtures.passes import no_pass_of
from tests.fixtures.shared import (
    image_folder,
    image_pipe,
    media_folders,
    media_pipe,
    new_folder,
    reading_folders,
    reading_pipe,
)
from tests.fixtures.speech import FAMILIES
from tests.fixtures.tiny_lms import shared_lm
from tests.fixtures.tiny_model import CAPTIONS
from tests.fixtures.tiny_vqa import build_vqa, scene
from tests.fixtures.video import build_text_encoder
from tests.messages.case import Refused

Call = Callable[[], Any]
_PARAMS = SamplingParams()


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


class _Tokenizer:
    def get_added_vocab(self) -> dict[str, int]:
        return {"<|end|>": 1}


_ODD: Any = "out"
_MEDIA = tuple(
    Refused(f"{kind}: {next(iter(options))}={next(iter(options.values()))!r}",
            _media(kind, **options), says)
    for kind in MEDIA
    for options, says in (
        (dict(batch_size=0), ("batch_size: expected an integer >= 1",)),
        (dict(temprature=1), (": expected options out of", "did you mean temperature?")),
        (dict(temperature=-1.0), ("temperature: expected a finite number >= 0",)),
        (dict(top_p=0), ("top_p",)),
        (dict(seed=[]), ("seed: expected an integer",)),
        (dict(seed="x"), ("seed: expected an integer",)),
        (dict(seed=2**64), ("expected a 64-bit integer",)),
        (dict(deliver=3), ("deliver: expected a function, received 3",)),
        (dict(policy=mmaccel.LosslessUnmask()),
         ("policy: expected a policy such as mmaccel.Jacobi",)),
    )
)  # fmt: skip
_MEDIA_FILES = tuple(
    Refused(f"{kind}: {name}", _reopen(kind, **options), (says,))
    for kind in MEDIA
    for name, options, says in (
        ("device='nowhere'", dict(model=False, device="nowhere"), "device: expected"),
        ("dtype int8", dict(model=False, dtype=torch.int8), "dtype: expected"),
        ("cuda_graphs='steam'", dict(model=False, cuda_graphs="steam"), "cuda_graphs: expected"),
        ("fused='steam'", dict(fused="steam"), "fused: expected"),
        ("no model", dict(model=False), "model: expected a folder"),
        ("no codec", dict(codec=False), "codec: expected a folder, a file, an id of the Hugg"),
    )
)
_SPEECH = tuple(
    Refused(f"{family}: {name}", _say(family, **options), says)
    for family in FAMILIES
    for name, options, says in (
        ("no texts", dict(text=[]), ("text: expected a text or a list of them, received",)),
        ("blanks", dict(text="  "), ("prompt: expected text to say, received '  '",)),
        ("a number", dict(text=["a fox", 3]), ("prompt: expected text to say, received 3",)),
        ("a control token", dict(text="say <|eot_id|> twice"), ("expected words", "<|eot_id|>")),
        ("max_seconds=0", dict(max_seconds=0),
         ("max_seconds: expected a number in 0..3600, 0 excluded, received 0",)),
        ("NaN seconds", dict(max_seconds=float("nan")), ("max_seconds: expected a number",)),
        ("seconds in quotes", dict(max_seconds="9"), ("max_seconds: expected a number",)),
        ("ten thousand words", dict(text="fox " * 10_000),
         ("positions: expected at most 160", "of the prompt", "shorten the text")),
        ("more seconds than positions", dict(max_seconds=30),
         ("positions: expected at most 160", "set max_seconds")),
        ("penalty 0", dict(repetition_penalty=0.0), ("penalty: expected a finite number > 0",)),
        ("two seeds for a text", dict(seed=[1, 2]), ("seed",)),
        ("half a character", dict(text=["a fox", "a \ud800 fox"]),
         (r"received '\ud800' at position 2; write it",)),
        ("the other half", dict(text=["a fox", "fox \udcff"]),
         (r"received '\udcff' at position 4; write it",)),
        ("a voice that is none", dict(voice="tara: or <|eot_id|>"), ("voice: expected",)),
    )
)  # fmt: skip
_VOICES = (
    Refused("a voice for Llasa", _say("llasa", voice="tara"), ("voice: expected none for Llasa",)),
    *(
        Refused(f"the voice {voice!r}", _say("orpheus", voice=voice),
                ("voice: expected a name such as tara, leah",))
        for voice in ("", " ", "a:b", "<tara", "tara\x1b[31m", "a\nb", "\ud800", 3)
    ),
    Refused("a control token in angle brackets", lambda: check_prompt("a <|end|> b", _Tokenizer()),
            ("received <|end|>",)),
)  # fmt: skip
_DEPTHS = "expected 8 or 16 bits a channel"
_STARTS = tuple(
    Refused(f"a clip that starts with {name}", _start(start), says)
    for name, start, says in (
        ("no pixels", Image.new("RGB", (0, 5)), ("images of pixels", "received one of 0x5")),
        ("floats of Pillow", Image.new("F", (5, 5)), (_DEPTHS, "mode 'F'")),
        ("integers of Pillow", Image.new("I", (5, 5)), (_DEPTHS, "mode 'I'")),
        ("nothing", None, ("received NoneType 'None'; open it",)),
        ("a file's name", "clip.mp4", ("received str 'clip.mp4'",)),
        ("no frames", [], ("received list",)),
        ("numbers", [1, 2], ("received list",)),
        ("channels first", torch.zeros(3, 4, 4), ("received a tensor [3, 4, 4] of torch.float32",)),
        ("four axes", torch.zeros(1, 3, 4, 4), ("received a tensor [1, 3, 4, 4]",)),
        ("no frames in a tensor", torch.zeros(0, 4, 4, 3), ("received a tensor [0, 4, 4, 3]",)),
        ("int64", torch.zeros(1, 4, 4, 3, dtype=torch.int64), ("of torch.int64",)),
        ("1.5", torch.full((1, 4, 4, 3), 1.5), ("expected floats in 0..1, received 1.5..1.5",)),
        ("NaN", torch.full((1, 4, 4, 3), float("nan")), ("floats in 0..1, received nan..nan",)),
    )
)
_SERVED = (
    Refused("serving to no function", _serve(params=SamplingParams(), deliver=_ODD),
            ("deliver: expected a function, received 'out'",)),
    Refused("serving with odd parameters", _serve(params=_ODD, deliver=print), ("params",)),
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


def _open_reading(width: int) -> Call:
    """The model that reads texts, with a T5 of another width."""

    def call() -> Any:
        encoder = build_text_encoder(new_folder("t5"), width)
        model, codec, _ = reading_folders()
        return mmaccel.ImageToVideo.from_pretrained(model, codec=codec, text_encoder=encoder)

    return call


_MORE = "fox " * 513
_READING = (
    Refused("a clip without the prompt that the model needs", _animate(None),
            ("prompt: expected what happens in the clip, received None; write one",)),
    Refused("a clip of blanks", _animate("  "), ("prompt: expected what happens in the clip",)),
    Refused("a clip of 513 words", _animate(_MORE), ("expected at most 512 tokens, received 513",)),
    Refused("a prompt for a model that reads none",
            lambda: media_pipe("cosmos")(image(), prompt="a fox runs"),
            ("prompt: expected none with a model that reads no text, received 'a fox runs'",
             "take nvidia/Cosmos-Predict1-5B-Video2World")),
    Refused("a T5 for a model that reads none",
            _reopen("cosmos", text_encoder=image_folder("llamagen-t2i")),
            ("text_encoder: expected none with", "which reads no text")),
    Refused("a T5 that is not there", _reopen("cosmos", text_encoder="none"),
            ("text_encoder: expected a folder",)),
    Refused("a T5 of 8 channels", _open_reading(8),
            ("text_encoder: expected a T5 of 16 channels, received one of 8",),
            UnsupportedModelError),
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
        ("a name of 300 letters", _ask("x" * 300), ("image: expected a file",)),
        ("a text for an image", _ask("words.txt"),
         ("image: expected an image", "words.txt', which Pillow")),
        ("a cut image", _ask("cut.png"), ("image: expected an image", "cut.png'")),
        ("a number for an image", _ask(7),
         ("image: expected a PIL image or the path of a file, received 7",)),
        ("no images", _ask([]), ("images: expected an image, a list of images",)),
        ("no images in a list", _ask([[]]), ("images: expected an image, a list of images",)),
        ("two lists", _ask([[1], [2]]),
         ("images: expected 1 lists, one for each question, received 2",)),
        ("no words", _ask(question=""), ("prompt: expected a question, received ''",)),
        ("no questions", _ask(question=[]), ("question: expected a text or a list of them",)),
        ("a number", _ask(question=3), ("question: expected a text",)),
        ("two images named", _ask(question="is <image> <image> red?"),
         ("images: expected 2, one for each <image>",)),
        ("max_new_tokens=0", _ask(max_new_tokens=0), ("max_new_tokens: expected an integer >= 1",)),
        ("5000 tokens", _ask(max_new_tokens=5000), ("positions: expected at most 2048",)),
        ("a negative temperature", _ask(temperature=-1.0), ("temperature: expected",)),
        ("two seeds", _ask(seed=[1, 2]), ("seed: expected an integer or 1 of them",)),
        ("half a seed", _ask(seed=0.5), ("seed: expected",)),
        ("batch_size=0", _ask(batch_size=0), ("batch_size: expected",)),
        ("floats of Pillow", lambda: read_image(Image.new("F", (2, 2))), (f"image: {_DEPTHS}",)),
        ("revival under Jacobi", _vqa_with(mmaccel.LazyLLM(keep=0.5)),
         ("expected Autoregressive() with LazyLLM",)),
        ("a misspelt method", _vqa_with("dartt"), ("did you mean dart",)),
        ("two methods of a stage",
         _vqa_with([mmaccel.HiRED(keep=0.5), mmaccel.DivPrune(keep=0.5)]),
         ("expected one method a stage",)),
        ("a model that is not there", _open_vqa("none"), ("model: expected a folder",)),
        ("a device that is not there", _open_vqa("alone", device="cuda:99"), ("device: expected",)),
        ("fused='steam'", lambda: ImageToText(_vqa().model, make_processor(), fused="steam"),  # type: ignore[arg-type]
         ("fused: expected",)),
        ("sync_every=0", lambda: ImageToText(_vqa().model, make_processor(), sync_every=0),
         ("sync_every: expected",)),
    )
)  # fmt: skip
_NO_READERS = tuple(
    Refused(f"questions to {name}", call, says, UnsupportedModelError)
    for name, call, says in (
        ("frames of an image", _vqa_with(mmaccel.VidCom2(keep=0.5)), ("received a LlavaNext",)),
        ("a model of text", _open_vqa("lm"), ("expected a vision-language", "received llama")),
        ("a model without a processor", _open_vqa("alone"), ("rocessor",)),
        ("a tokenizer alone", lambda: ImageToText(build_vqa(), make_processor().tokenizer),
         ("expected one with image_processor",)),
    )
)  # fmt: skip


# ------------------------------------------------------------------------------ images


def _draw(**options: Any) -> Call:
    return lambda: image_pipe("words")(CAPTIONS[:1], **options)


def _stream(prompts: Any = CAPTIONS, params: Any = _PARAMS) -> Call:
    return lambda: image_pipe("words").stream(prompts, params)


def _open_words(**options: Any) -> Call:
    return lambda: TextToImage.from_pretrained(**{"name": image_folder("words")} | options)


_IMAGES = (
    *(
        Refused(f"{name} for captions", _stream(prompts),
                ("prompt: expected a prompt or a list of them",))
        for name, prompts in (("nothing", None), ("a number", 5), ("an iterator", iter(CAPTIONS)),
                              ("one caption", "a red circle"), ("an empty list", []))
    ),
    Refused("a stream without parameters", _stream(params=None),
            ("params: expected mmaccel.SamplingParams",)),
    *(
        Refused(f"on_step returns {returned!r}", _draw(on_step=lambda _, given=returned: given),
                ("on_step: expected None or whole lengths [1] in return",), ShapeError)
        for returned in ([1], 3, torch.zeros(2).long(), torch.zeros(1, 1).long(),
                         torch.tensor([float("inf")]), torch.tensor([False]))
    ),
    *(
        Refused(f"an image with seed={seed!r}", _draw(seed=seed),
                ("seed: expected an integer or one per row",))
        for seed in (True, b"12", bytearray(b"1"), "12", [False], [b"1"], [], np.ones(1),
                     torch.tensor(True))
    ),
    *(
        Refused(f"{name} that no float can hold", _draw(**{name: 10**400}), (f"{name}: expected",))
        for name in ("guidance_scale", "temperature")
    ),
    *(
        Refused(f"images from {next(iter(options))}={next(iter(options.values()))!r}",
                _open_words(**options), says)
        for options, says in (
            ({"device": "meta"}, ("device: expected a device of this machine, received 'meta'",)),
            ({"device": "gpu"}, ("device: expected a device of this machine, received 'gpu'",)),
            ({"device": 3.5}, ("device: expected a device of this machine",)),
            ({"dtype": torch.int8}, ("dtype: expected auto, float32",)),
            ({"dtype": "float8"}, ("dtype: expected auto, float32",)),
            ({"dtype": torch.float8_e4m3fn}, ("dtype: expected auto, float32",)),
            ({"dtype": None}, ("dtype: expected auto, float32",)),
            ({"name": None}, ("model: expected a folder", "received None")),
            ({"name": ""}, ("model: expected a folder", "received ''")),
        )
    ),
)  # fmt: skip

CASES = (
    *_MEDIA, *_MEDIA_FILES, *_SPEECH, *_VOICES, *_STARTS, *_SERVED, *_READING, *_QUESTIONS,
    *_NO_READERS, *_IMAGES,
)  # fmt: skip
