"""Checkpoints of speech, video and image models that are not what they should be; coarse models."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mmaccel import ImageToVideo, Jacobi, OptionError, TextToImage, TextToSpeech
from mmaccel.errors import AttachError, MissingBackendError, UnsupportedModelError
from mmaccel.pipelines.models import speech_tokens
from tests.fixtures.media import image
from tests.fixtures.shared import media_folders, new_folder
from tests.fixtures.video import SHAPE
from tests.messages.case import Refused
from tests.models.test_coarse_folders import open_llamagen, save_random

Change = Callable[[Path], object]


def _copy(folder: Path, change: Change | None = None) -> Path:
    """A copy that a case may change."""
    made: Path = shutil.copytree(folder, new_folder("copy") / folder.name)
    if change is not None:
        change(made)
    return made


# ------------------------------------------------------------------------------ speech


def _speech(model: str, codec: str, change: Change | None = None, **options: Any) -> Any:
    """Opening a speech model with a codec of the same family or of the other."""

    def call() -> Any:
        source, own = media_folders(model)[0], media_folders(codec)[1]
        folder = source if change is None else _copy(source, change)
        with mock.patch.object(speech_tokens, "check_windows"):  # what is refused, is before it
            return TextToSpeech.from_pretrained(folder, codec=own, **options)

    return call


def _without_snac() -> Any:
    model, codec = media_folders("orpheus")
    with mock.patch.dict(sys.modules, {"snac": None}):
        return TextToSpeech.from_pretrained(model, codec=codec)


def _template(text: str | None) -> Change:
    def spoil(folder: Path) -> None:
        (folder / "chat_template.jinja").unlink()
        if text is not None:
            (folder / "chat_template.jinja").write_text(text, encoding="utf-8")

    return spoil


_ENDS_EARLY = "{% for m in messages %}{{ m.content[:5] }}{% endfor %}"
_SPEECH = (
    Refused("no package of the codec", _without_snac, ("pip install snac",), MissingBackendError),
    *(
        Refused(name, call, says, UnsupportedModelError)
        for name, call, says in (
            *(
                (
                    f"the chat template {text!r}"[:60],
                    _speech("llasa", "llasa", _template(text)),
                    says,
                )
                for text, says in (
                    (None, ("chat_template is not set",)),
                    (_ENDS_EARLY, ("received a prompt that ends otherwise",)),
                )
            ),
        )
    ),
)  # fmt: skip


# ------------------------------------------------------------------------------ Cosmos


def _video(change: Change | None = None, codec: Change | None = None, run: bool = False) -> Any:
    """Opening Cosmos with a changed model or codec, and a call of it if it opens."""

    def call() -> Any:
        model, own = media_folders("cosmos")
        model = model if change is None else _copy(model, change)
        own = own if codec is None else _copy(own, codec)
        pipe = ImageToVideo.from_pretrained(model, codec=own)
        return pipe(image()) if run else pipe

    return call


def _weights(change: Callable[[dict[str, Tensor]], object]) -> Change:
    def apply(folder: Path) -> None:
        content = torch.load(folder / "model.pt")
        change(content["model"])
        torch.save(content, folder / "model.pt")

    return apply


def _config(config: Any) -> Change:
    text = config if isinstance(config, str) else json.dumps(config)
    return lambda folder: (folder / "config.json").write_text(text, encoding="utf-8")


YARN = {
    "apply_yarn": True, "original_latent_shape": [2, 2, 3],
    "yarn_scale": 2, "yarn_beta_fast": 4, "yarn_beta_slow": 1,
}  # fmt: skip
_KEY = "model.layers.{}.attention.wk.weight"
_COSMOS = tuple(
    Refused(f"Cosmos with {name}", call, says, UnsupportedModelError)
    for name, call, says in (
        ("a missing weight", _video(_weights(lambda w: w.pop(_KEY.format(1)))),
         ("Missing key", "layers.1")),
        *(
            (f"the shape {shape!r}", _video(_config({"video_latent_shape": shape})),
             ("video_latent_shape",))
            for shape in ([3, 2],)
        ),
        *(
            (str(config), _video(_config({"video_latent_shape": SHAPE} | YARN | config)),
             says)
            for config, says in (
                ({"rope_theta": "500000"}, ("rope_theta in", "received '500000'")),
            )
        ),
    )
)  # fmt: skip


# ------------------------------------------------------------------------------ image models


@cache
def _llamagen() -> TextToImage:
    return open_llamagen(new_folder("llamagen with a coarse model"))


def _other_matrix(change: Callable[[Tensor], Tensor]) -> Any:
    """A coarse model made for another output matrix."""

    def call() -> Any:
        pipe = _llamagen()
        matrix = change(pipe.model.output_matrix())
        window = type("Other", (), {"output_matrix": lambda self: matrix})()
        folder = new_folder("coarse")
        source = save_random(window, folder, pipe.image_model.layout)
        return pipe("1", policy=Jacobi(8, source))

    return call


_IMAGES = (
    *(
        Refused(name, call, ("expected", "8 columns", "received", "4", "; make"), OptionError)
        for name, call in (
        )
    ),
    *(
        Refused(name, _other_matrix(change), ("drafts: expected", "; make one"))
        for name, change in (
        )
    ),
    *(
        Refused(name, call, says, AttachError)
        for name, call, says in (
        )
    ),
)  # fmt: skip

CASES = (*_SPEECH, *_COSMOS, *_IMAGES)
