"""Values that no argument of the Python API expects: taken, or refused on one line and at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pytest
import torch

import mmaccel
from mmaccel.catalog import METHODS, load, read_method, read_policy
from mmaccel.checks import show
from mmaccel.errors import MMAccelError, OptionError
from tests.fixtures.media import build_media
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.tiny_model import build_tiny

PROMPT = "a red circle"
MOST = 1_000  # characters of a message


class Walked(Sequence[int]):
    """A thousand million numbers, as `range(10**9)`, that may not be walked through."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: Any) -> Any:
        if index > 1_000:
            raise AssertionError("it was walked through")
        return index


VALUES: dict[str, Any] = {
    "numpy float": np.float32(0.5), "numpy bool": np.bool_(True), "array": np.array([1, 2]),
    "tensor of none": torch.tensor(2), "large tensor": torch.zeros(300, 300), "list": [],
    "dictionary": {}, "nested": [{}], "long text": "x" * 30_000, "long list": ["x" * 100] * 300,
    "many": Walked(), "range": range(10**400), "object": object(), "bytes": b"x", "set": {1},
    "large": 10**400, "nan": float("nan"), "infinite": float("inf"), "negative": -1, "a type": str,
    "64 bits": 2**63, "tiny": 1e-300, "word": "no", "nan inside": ((float("nan"),) * 2,),
}  # fmt: skip


def attempt(call: Callable[[], Any]) -> str | None:
    """Why a call breaks its promise; None where it does what was asked or refuses in words."""
    try:
        call()
    except MMAccelError as error:
        said = str(error)
        return None if len(said) <= MOST and "\n" not in said else f"{len(said)}: {said[:90]!r}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:90]}"
    return None


def complaints(call: Callable[..., Any], names: Sequence[str], **fixed: Any) -> list[str]:
    """What is wrong with the answers to all values of all arguments."""
    wrong = []
    for name in names:
        for title, value in VALUES.items():
            given = fixed | {name: value}
            said = attempt(lambda given=given: call(**given))  # type: ignore[misc]
            if said is not None:
                wrong.append(f"{name}={title}: {said}")
    return wrong


def names_of(call: Callable[..., Any], *but: str) -> list[str]:
    """The arguments of a function."""
    return [name for name in inspect.signature(call).parameters if name not in but]


@pytest.mark.parametrize(
    "target", {each.target: 0 for entries in METHODS.values() for each in entries.values()}
)
def test_fields_of_methods(target: str) -> None:
    method = load(target)
    begin = process_time()
    assert complaints(method, [field.name for field in fields(method) if field.init]) == []
    assert process_time() - begin < 10


@pytest.mark.parametrize(
    ("made", "fixed"),
    [
        *((each, {}) for each in (mmaccel.DISCO, mmaccel.SpecDecPP, mmaccel.SVIP)),
        (mmaccel.SourceText, {"tokens": (1, 2)}),
        (mmaccel.SourceImage, {}),
        (mmaccel.Noise, {"seeds": torch.tensor([0]), "items": torch.tensor([0])}),
        (mmaccel.SamplingParams, {}),
        (mmaccel.Grid, {"rows": 2, "width": 2, "vocab_size": 8}),
        (mmaccel.Frames, {"ranges": ((0, 4),), "vocab_size": 8}),
        (mmaccel.Noise.from_seed, {"seed": 0, "batch": 2}),
    ],
)
def test_fields_of_what_calls_take(made: Any, fixed: dict[str, Any]) -> None:
    assert complaints(made, names_of(made, "device"), **fixed) == []


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> mmaccel.TextToImage:
    return mmaccel.TextToImage.from_pretrained(build_tiny(tmp_path_factory.mktemp("a") / "tiny"))


def test_arguments_of_an_image_call(images: mmaccel.TextToImage) -> None:
    names = names_of(images.__call__, "callback_on_step_end", "on_step", "return_dict")
    assert complaints(images, names, prompt=PROMPT) == []


def test_arguments_of_requests(images: mmaccel.TextToImage) -> None:
    fixed = {"requests": [mmaccel.Request(PROMPT, 0)], "params": mmaccel.SamplingParams()}
    names = ["requests", "params", "policy", "rows", "prompt_width"]
    assert complaints(images.serve, names, deliver=lambda made: None, **fixed) == []

    def serve(prompt: Any = PROMPT, seed: Any = 0) -> None:
        request = mmaccel.Request(prompt, seed)
        images.serve([request], mmaccel.SamplingParams(), deliver=lambda made: None)

    assert complaints(serve, ["prompt", "seed"]) == []


def test_arguments_of_attach() -> None:
    model = build_lm("llama")

    def attach(target: Any = model, policy: Any = "jacobi", **options: Any) -> None:
        mmaccel.attach(target, policy, **options).detach()

    assert complaints(attach, names_of(mmaccel.attach)) == []
    assert complaints(mmaccel.supports, ["target"]) == []


def test_arguments_of_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`from_pretrained` refuses them; no good value is among these, which would load a model."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    name, codec = build_media("cosmos", tmp_path)
    load = mmaccel.ImageToVideo.from_pretrained
    names = names_of(load, "token", "revision", "local_files_only")
    assert complaints(load, names, name=name, codec=codec) == []


def test_messages_show_what_fits_on_a_screen() -> None:
    error = OptionError(f"a: expected one, received {'x' * 30_000!r}; write it")
    assert str(error) == f"a: expected one, received '{'x' * 299}...'; write it"
    kept = "the model's own (" + "words " * 200 + "), as transformers' loop"
    assert str(OptionError(kept)) == kept  # apostrophes quote nothing
    many = str(OptionError("first " + "[1, 2], " * 4_000 + "last"))
    assert len(many) < 9_000 and many.startswith("first") and many.endswith("last")
    assert show(np.zeros((30, 40))) == "a ndarray [30, 40] of float64"
    assert show(torch.zeros(3)) == "a Tensor [3] of torch.float32"
    assert show("a  b\n") == r"'a  b\n'"
    assert show(10**5_000) == "a int that is too long to print"


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (partial(read_method, "visual_tokens"), "cdpruner:unlike=no",
         mmaccel.CDPruner(keep=0.22, unlike=False)),
        (partial(read_method, "visual_tokens"), {"name": "ficoco-v", "local_penalty": "off"},
         mmaccel.FiCoCoV(0.22, local_penalty=False)),
        (partial(read_method, "tree"), "sequoia:acceptance=0.5", "acceptance: expected a list"),
        (partial(read_method, "tree"), "sequoia:acceptance=((.5,.4),)",
         mmaccel.Sequoia(acceptance=((0.5, 0.4),))),
        (partial(read_method, "kv_cache"), "quantized-cache:over=tova",
         mmaccel.QuantizedCache(over=mmaccel.TOVA())),
        (read_policy, "adaptive-block:delimiters=[3]", mmaccel.AdaptiveBlock(delimiters=(3,))),
        (read_policy, {"name": "jacobi", "drafts": Path("none")}, "drafts: expected a folder"),
        (lambda x: mmaccel.Noise(x, x), "x", "Noise.seeds: expected a Tensor, received 'x'"),
    ],
)  # fmt: skip
def test_texts_are_read_by_the_types_of_fields(read: Any, text: Any, said: Any) -> None:
    if isinstance(said, str):
        with pytest.raises(OptionError, match=said):
            read(text)
    else:
        assert read(text) == said
