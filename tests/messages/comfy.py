"""Values of widgets that a node refuses before anything is loaded or runs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.values import check_widget, refusal
from mmaccel.errors import OptionError
from tests.fixtures.tiny_lms import build_lm
from tests.messages.case import Refused

_LOADERS = ("LoadModel", "LoadSpeechModel", "LoadVideoModel", "LoadVisionModel", "TextToImage")
_RUNS = ("GenerateImage", "Compare", "GenerateSpeech", "GenerateVideo", "AnswerQuestion")


def _of_text_model() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        build_lm("llama").save_pretrained(Path(folder) / "lm")
        return _refuse("LoadVisionModel", {"model": str(Path(folder) / "lm")})


def _refuse(node: str, values: dict[str, Any]) -> Any:
    spec = NODES[f"MMAccel{node}"]
    message = refusal(spec, values)
    if message is not None:
        raise OptionError(message)


def _node(node: str, values: dict[str, Any]) -> Callable[[], Any]:
    return lambda: _refuse(node, values)


def _case(node: str, values: dict[str, Any], *says: str) -> Refused:
    named = ", ".join(f"{name} {value!r}" for name, value in values.items())
    return Refused(f"{node} with {named}", _node(node, values), says=says)


_WIDGET = next(each for each in NODES["MMAccelGenerateImage"].widgets if each.name == "min_p")

CASES = (
    *(_case(node, {"model": "none"}, "model: expected a folder", "'none'") for node in _LOADERS),
    *(
        _case(node, {"device": "cuda:9"}, "device: expected a device of this machine")
        for node in _LOADERS[:-1]
    ),
    *(
        _case(node, {"device": "cpu", "cuda_graphs": "on"}, "a model on a CUDA device", "on cpu")
        for node in _LOADERS[:-1]
    ),
    *(
        _case(node, {"family": "bark"}, "family: expected one of", "'bark'")
        for node in ("LoadModel", "LoadSpeechModel")
    ),
    *(
        _case(node, {"codec": "none"}, "codec: expected a folder")
        for node in ("LoadSpeechModel", "LoadVideoModel")
    ),
    *(_case(node, {"temperature": -0.5}, "temperature: expected", "-0.5") for node in _RUNS),
    *(_case(node, {"top_p": 0.0}, "top_p: expected", "0.0") for node in _RUNS),
    *(_case(node, {"top_p": 1.5}, "top_p: expected", "1.5") for node in _RUNS),
    *(_case(node, {"seed": 2**64}, "seed: expected", str(2**64)) for node in _RUNS),
    *(
        _case(node, {"batch_size": 0}, "batch_size: expected a number in 1..", "received 0")
        for node in _RUNS
        if node != "GenerateVideo"
    ),
    _case("LoadModel", {"model": '""'}, "model: expected", "received ''"),
    _case("LoadModel", {"width": 64}, "width, height: expected both or neither", "64 and 0"),
    _case("LoadModel", {"dtype": "int8"}, "dtype: expected auto, float32, bfloat16"),
    _case("LoadModel", {"device": "tpu"}, "device: expected a device of this machine"),
    _case("LoadModel", {"decoder": "/no/file"}, "decoder: expected a file", "'/no/file'"),
    Refused("a model that reads no images", _of_text_model, ("expected a vision-language model",)),
    _case("GenerateImage", {"num_images": 5000}, "num_images: expected a number in 0..4096"),
    _case("GenerateImage", {"seed": -2}, "seed: expected a 64-bit integer that is not negative"),
    _case("TextToImage", {"policy": "best"}, "policy: expected one of autoregressive, jacobi"),
    _case("TextToImage", {"width": 64}, "width, height: expected both or neither", "64 and 0"),
    _case("TextToImage", {"guidance_scale": -2.0}, "guidance_scale: expected"),
    _case("TextToImage", {"num_images": 5000}, "num_images: expected a number in 0..4096"),
    _case("TextToImage", {"seed": -2}, "seed: expected a 64-bit integer that is not negative"),
    _case("GenerateSpeech", {"text": " \n "}, "prompt: expected text to say", "received ''"),
    _case("GenerateSpeech", {"repetition_penalty": 0.0}, "penalty: expected a finite number > 0"),
    _case("GenerateSpeech", {"max_seconds": 4000.0}, "max_seconds: expected a number in 0..3600"),
    _case("AnswerQuestion", {"question": " \n "}, "prompt: expected a question"),
    _case("AnswerQuestion", {"max_tokens": 0}, "max_tokens: expected a number in 1..65536"),
    _case("VisualTokens", {"keep": 0.0}, "DART.keep: expected a number in (0, 1], received 0"),
    _case("VisualTokens", {"keep": 1.5}, "DART.keep: expected a number in (0, 1]"),
    _case("VisualTokens", {"n_keep": -1}, "DART.n_keep: expected an integer >= 1"),
    _case("VisualTokens", {"method": "best"}, "visual_tokens: expected one of downsample"),
    _case(
        "FastvVisualTokens", {"layer": 0}, "FastV: layer: expected an integer >= 1", "received 0"
    ),
    _case("EntropyBoundedPolicy", {"gamma": 0.1, "budget_nats": 1.0}, "gamma, budget_nats"),
    _case("AdaptiveBlockPolicy", {"delimiters": "x"}, "delimiters: expected token ids such as"),
    _case("JacobiPolicy", {"window": 4097}, "window: expected an integer in 1..4096"),
    *(
        Refused(
            f"a number that is {value!r}",
            lambda value=value: check_widget(_WIDGET, value),  # type: ignore[misc]
            says=("min_p: expected a number in -1..1",),
        )
        for value in (float("nan"), -1.1, 2.1, float("inf"), True, "1", None)
    ),
)
