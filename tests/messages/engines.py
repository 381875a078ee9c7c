"""How a model's passes are run: CUDA graphs, the fused decoder, compiled passes, kernels."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch

import mmaccel
from mmaccel.errors import MissingBackendError, OptionError, UnsupportedModelError
from mmaccel.kernels import dispatch
from mmaccel.pipelines.runner import compiled_passes
from mmaccel.pipelines.runner.engine import Engine
from tests.fixtures.canvas import masked
from tests.fixtures.checkpoints import build_checkpoint, captions
from tests.fixtures.fused_lms import UNRECOGNISED, build_decoder
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.windows import build_model
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


def _draw_by_llamagen() -> None:
    with TemporaryDirectory() as folder:
        built = build_checkpoint("llamagen-t2i", Path(folder))
        pipe = mmaccel.TextToImage.from_pretrained(built, device="cpu", fused=True)
        pipe(captions("llamagen-t2i")[0])


def _draw_masked() -> None:
    pipe = mmaccel.TextToImage.from_pretrained("scenes-masked", device="cpu", fused=True)
    pipe(pipe.image_model.examples[0])


def _draw_masked_in_chunks() -> None:
    pipe = mmaccel.TextToImage.from_pretrained("scenes-masked", device="cpu", prefill_chunk_size=8)
    pipe(pipe.image_model.examples[0])


def _generate_in_chunks_of_nothing() -> None:
    model = build_lm("llama")
    with mmaccel.attach(model, "jacobi", strict=True):
        model.generate(torch.arange(4, 24)[None], max_new_tokens=4, prefill_chunk_size=0)


def _compile_without_a_compiler() -> None:
    reason = "torch finds no C++ compiler; install g++"
    with mock.patch.object(compiled_passes, "find_obstacle", lambda: reason):
        Engine(compile=True).check("cpu")


_OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "graphs by name": ({"cuda_graphs": "cuda"}, ("cuda_graphs", "'auto', True or False", "'cuda'")),
    "graphs by number": ({"cuda_graphs": 1}, ("cuda_graphs", "'auto', True or False", "1")),
    "no pass between reads": ({"sync_every": 0}, ("sync_every", "an integer >= 1", "0")),
    "a truth of passes": ({"sync_every": True}, ("sync_every", "an integer")),
    "a fraction of passes": ({"sync_every": 2.0}, ("sync_every", "an integer")),
    "chunks of nothing": (
        {"prefill_chunk_size": 0},
        ("prefill_chunk_size", "an integer >= 1", "0", "try 512"),
    ),
    "a fraction of chunks": ({"prefill_chunk_size": 1.5}, ("prefill_chunk_size", "an integer")),
    "a truth of chunks": ({"prefill_chunk_size": True}, ("prefill_chunk_size", "an integer")),
    "compiling by number": ({"compile": 1}, ("compile", "'auto', True or False", "1")),
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
    *(
        Refused(
            f"the fused decoder by {value!r}",
            _attach("llama", fused=value),
            says=("fused", "'auto', 'exact', True or False"),
        )
        for value in ("yes", 1, None)
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
        "graphs of a pipeline on a CPU",
        _open(cuda_graphs=True, device="cpu"),
        says=("received one on cpu",),
        error=MissingBackendError,
    ),
    Refused(
        "a head that masks ids",
        lambda: mmaccel.attach(build_model("chameleon"), "jacobi", fused=True),
        says=("fused=True",),
        error=UnsupportedModelError,
    ),
    Refused(
        "a transformer of our own",
        _draw_by_llamagen,
        says=("fused=True", "LlamaGenWindow"),
        error=UnsupportedModelError,
    ),
    Refused(
        "a masked model",
        _draw_masked,
        says=("fused=True", "leave them out"),
        error=UnsupportedModelError,
    ),
    Refused(
        "a canvas in chunks",
        _draw_masked_in_chunks,
        says=("prefill_chunk_size", "whole canvases", "leave it out"),
        error=UnsupportedModelError,
    ),
    Refused(
        "a denoiser in chunks",
        lambda: mmaccel.attach(masked(), "lossless-unmask", prefill_chunk_size=4),
        says=("prefill_chunk_size", "received 4", "whole canvases", "leave it out"),
    ),
    Refused(
        "a call in chunks of nothing",
        _generate_in_chunks_of_nothing,
        says=("prefill_chunk_size", "an integer >= 1", "0"),
    ),
    Refused(
        "compiling on a GPU",
        lambda: Engine(compile=True).check("cuda:1"),
        says=("a model on a CPU", "one on cuda:1"),
        error=MissingBackendError,
    ),
    Refused(
        "compiling an unknown layer",
        _attach(next(iter(UNRECOGNISED)), compile=True),
        says=("compile=True", "set compile='auto'"),
        error=UnsupportedModelError,
    ),
    Refused(
        "compiling without a compiler",
        _compile_without_a_compiler,
        says=("torch finds no C++ compiler; install g++",),
        error=MissingBackendError,
    ),
)
