"""Images: calls, requests, checkpoints and options that are refused before any pass."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import mmaccel
from mmaccel import Request, SamplingParams, TextToImage
from mmaccel.errors import MMAccelError, OptionError, UnsupportedModelError
from tests.fixtures.checkpoints import SIZES, build_checkpoint
from tests.fixtures.tiny_model import CAPTIONS, build_tiny, masked_beside_plain
from tests.messages.case import Refused

_NO = UnsupportedModelError
_Spoil = Callable[[Path], Any]


@cache
def _home() -> Any:
    return tempfile.TemporaryDirectory()  # which Python removes at its end


@cache
def _folder(family: str) -> Path:
    """The folder of a family's tiny checkpoint, of the tiny model, or of the masked one."""
    folder = Path(_home().name) / family
    folder.mkdir()
    if family == "tiny":
        return build_tiny(folder)
    return (
        masked_beside_plain(folder)[0] if family == "masked" else build_checkpoint(family, folder)
    )


@cache
def _pipe(family: str) -> TextToImage:
    return TextToImage.from_pretrained(_folder(family), size=SIZES.get(family))


def _call(family: str, prompt: Any = CAPTIONS[0], **options: Any) -> Callable[[], Any]:
    """A call that must be refused before any pass."""

    def call() -> Any:
        def fail(progress: Any) -> None:
            raise AssertionError("a pass was made")

        _pipe(family)(prompt, on_step=fail, **options)

    return call


def _arguments(family: str, *rows: tuple[dict[str, Any], str]) -> list[Refused]:
    """Rows of arguments of a call, and what the refusal says."""
    return [
        Refused(f"{family}: {options}", _call(family, **options), says=tuple(said.split(" … ")))
        for options, said in rows
    ]


def _serve(requests: Any, *says: str, **options: Any) -> Refused:
    """A list of requests that is refused before any pass."""

    def call() -> Any:
        pipe = _pipe("tiny")
        given = {"params": pipe.image_model.params, "deliver": print, **options}
        pipe.serve(requests, **given)

    return Refused(f"requests {requests!r} with {options}", call, says=says)


def _open(family: str, said: str, /, **options: Any) -> Refused:
    """Options that a model cannot be opened with."""
    name = f"{family} opened with {options}"
    call = lambda: TextToImage.from_pretrained(_folder(family), **options)  # noqa: E731
    return Refused(name, call, says=tuple(said.split(" … ")))


def _named(name: str, *says: str, error: Any = MMAccelError) -> Refused:
    """A name that is no model."""
    return Refused(f"model {name[:9]!r}", lambda: TextToImage.from_pretrained(name), says, error)


def _spoilt(family: str, spoil: _Spoil, said: str, error: Any = _NO) -> Refused:
    """A checkpoint with a part that is missing or does not fit."""

    def call() -> Any:
        source = _folder(family)
        with tempfile.TemporaryDirectory() as folder:
            base = source if source.is_dir() else source.parent
            copy = Path(shutil.copytree(base, Path(folder) / "spoilt"))
            spoil(copy)
            name = copy if source.is_dir() else copy / source.name
            TextToImage.from_pretrained(name, size=SIZES.get(family))

    return Refused(f"a spoilt {family}: {said}", call, tuple(said.split(" … ")), error)


def _edit(part: str, change: Callable[[dict[str, Any]], Any], folder: Path) -> None:
    (file,) = (folder / part).glob("model.safetensors" if part == "." else "*.safetensors")
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def _drop(name: str, part: str = ".") -> _Spoil:
    return partial(_edit, part, lambda weights: weights.pop(name))


def _without(name: str) -> _Spoil:
    return lambda folder: (folder / name).unlink()


def _json(name: str, **content: object) -> _Spoil:
    return lambda folder: (folder / name).write_text(json.dumps(content))


def _alone(folder: Path) -> None:
    """Without the folder beside it that has the image tokenizer."""


def _tell_callback(change: Callable[[dict[str, Any]], Any]) -> Callable[[], Any]:
    def callback(pipe: Any, step: int, timestep: int, state: dict[str, Any]) -> Any:
        return change(state)

    return lambda: _pipe("tiny")(CAPTIONS[0], seed=0, callback_on_step_end=callback)


_GOOD = Request(CAPTIONS[0], 1)

CASES = (
    *_arguments(
        "tiny",
        ({"prompt": "a green circle"}, "received 'green'; it knows: a red blue … name another"),
        ({"prompt": [5]}, "prompt: expected a prompt, received 5"),
        ({"prompt": " ".join(["a"] * 13)}, "at most 12 words, received 13"),
        ({"policy": "jacobbi"}, "did you mean jacobi"),
        ({"policy": {"name": "jacobi", "windows": 5}}, "options out of window … did you mean win"),
        ({"policy": mmaccel.Stepwise()}, "such as mmaccel.Jacobi(window=32)"),
        ({"seed": [1, 2]}, "seed: expected an integer or 1"),
        ({"generator": torch.Generator(), "seed": 0}, "expected it or a seed"),
        ({"output_type": "latent"}, "output_type: expected one of pil, pt, np, tokens"),
        ({"num_inference_steps": 50}, "received 50; … leave it out, or choose passes with policy"),
        ({"height": 512, "width": 512}, "size: expected … received 512x512"),
        ({"negative_prompt": "red", "guidance_scale": 1}, "guidance_scale other than 1 with it"),
        ({"negative_prompt": "a dragon"}, "negative prompt: expected words the … 'dragon'"),
    ),
    *_arguments(
        "emu3",
        ({"prompt": "a red fox", "negative_prompt": "a <boi>"}, "negative prompt: … <boi>"),
        ({"prompt": "a red fox", "negative_prompt": "cat " * 300}, "positions: expected at most"),
    ),
    *_arguments(
        "masked",
        ({"policy": mmaccel.Jacobi()}, "such as mmaccel.LosslessUnmask(), received Jacobi"),
        (
            {"policy": "stepwise", "num_inference_steps": 5},
            "none under Stepwise … MaskedParallel()",
        ),
        ({"policy": "masked-parallel", "num_inference_steps": 0}, "num_inference_steps: expected"),
    ),
    *(
        Refused(f"a callback that {does}", _tell_callback(change), says=(said,))
        for does, change, said in (
            ("returns more", lambda s: {"tokens": s["tokens"] + 1}, "tokens as it was given"),
        )
    ),
    Refused(
        "saving",
        lambda: _pipe("tiny").save_pretrained("folder"),
        says=("copy the folder or file it was loaded from",),
        error=AttributeError,
    ),
    Refused(
        "attaching to a pipeline of ours",
        lambda: mmaccel.attach(_pipe("tiny"), "jacobi"),
        says=("to its call: pipe(..., policy=policy)",),
        error=_NO,
    ),
    _serve([_GOOD, Request("a purple dragon", 1)], "dragon"),
    _serve([_GOOD, CAPTIONS[0]], "requests: expected a list"),
    _serve([Request(CAPTIONS[0], [1, 2])], "seed: expected one integer"),  # type: ignore[arg-type]
    _serve(
        [Request(CAPTIONS[0], 1, None, "red")],
        "guidance_scale other than 1 with it",
        params=SamplingParams(),
    ),
    _named("no-such", "model: expected a folder", "'no-such'", error=OptionError),
    *(_named(name, "model: expected") for name in ("..", "a/b/c")),
    _open("janus", "size: expected 16x16, the only one of this model", size=(512, 512)),
    _open("emu3", "size: expected multiples of 8, received 30x32", size=(30, 32)),
    _open("lumina-mgpt", "size: expected sides the model has a token for", size=(96, 64)),
    _open("llamagen-c2i", "size: expected a square", size=(64, 32)),
    _open("emu3", "family: expected one of words, masked-words, janus", family="janos"),
    _open("llamagen-c2i", "decoder: expected a file", decoder="/no/such.pt", size=(64, 64)),
    _open("janus", "decoder: expected none for janus", decoder=__file__),
    _open("emu3", "size: expected a list, received 64", size=64),
    _spoilt("emu3", _drop("text_model.model.norm.weight"), "1 missing,  … norm"),
    _spoilt("janus", _without("chat_template.jinja"), "expected a chat template"),
    _spoilt(
        "chameleon", _without("vqgan.ckpt"), "decoder: expected weights of VQGAN's", OptionError
    ),
    _spoilt(
        "chameleon", _json("config.json", model_type="vit"), "expected words.json, config.json"
    ),
    _spoilt("masked", _alone, "tokenizer", OptionError),
    *(
        _spoilt("tiny", spoil, said, MMAccelError)
        for spoil, said in (
            (_json("words.json", words=["a"], max_words=3), "vocabulary of 34 ids … received 41"),
            (_without("words.json"), "expected words.json,  … received llama"),
        )
    ),
)
