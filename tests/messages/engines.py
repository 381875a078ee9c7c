"""How a model's passes are run: CUDA graphs, the fused decoder, compiled passes, kernels."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import mmaccel
from mmaccel.errors import MissingBackendError, OptionError, UnsupportedModelError
from mmaccel.kernels import dispatch
from mmaccel.pipelines.runner.engine import Engine
from tests.fixtures.fused_lms import UNRECOGNISED, build_decoder
from tests.fixtures.tiny_lms import build_lm
from tests.messages.case import Refused


def _attach(name: str, **options: Any) -> Callable[[], Any]:
    return lambda: mmaccel.attach(build_decoder(name), "jacobi", **options)


def _open(**options: Any) -> Callable[[], Any]:
    return lambda: mmaccel.TextToImage.from_pretrained("scenes", **options)


def _with_kernels(value: str, call: Callable[[], Any]) -> Callable[[], Any]:
    def refused() -> None:
        with mock.patch.dict(os.environ, {dispatch.VARIABLE: value}):
            call()

    return refused


_OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "compiling without the fused decoder": (
        {"fused": False, "compile": True},
        ("compile=True", "the fused decoder"),
    ),
}
_KERNELS = {
    "fast": (("MMACCEL_KERNELS", "auto, torch, triton", "'fast'"), OptionError),
    "triton": (("MMACCEL_KERNELS=triton", "a device that Triton"), MissingBackendError),
}
_OPENINGS = {
    "attach": lambda: mmaccel.attach(build_lm("llama"), "jacobi"),
    "a pipeline": _open(),
}

CASES = (
    *(Refused(name, partial(Engine, **given), says) for name, (given, says) in _OPTIONS.items()),
    *(
        Refused(f"kernels {value!r}, {door}", _with_kernels(value, call), says, error)
        for value, (says, error) in _KERNELS.items()
        for door, call in _OPENINGS.items()
    ),
    *(
        Refused(
            f"an unknown layer: {name}",
            _attach(name, fused=True),
            says=("fused=True", reason, "set fused='auto'"),
            error=UnsupportedModelError,
        )
        for name, (_, _, reason) in UNRECOGNISED.items()
    ),
    Refused(
        "graphs of a policy that synchronises",
        lambda: Engine(True).check("cuda", mmaccel.Speculative()),
        says=("a policy whose passes can be captured",),
    ),
    Refused(
        "graphs on a CPU",
        _attach("llama", cuda_graphs=True),
        says=("cuda_graphs=True", "a model on a CUDA"),
        error=MissingBackendError,
    ),
    Refused(
        "compiling on a GPU",
        lambda: Engine(compile=True).check("cuda:1"),
        says=("a model on a CPU", "one on cuda:1"),
        error=MissingBackendError,
    ),
)
