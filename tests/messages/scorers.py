"""Files of KVzap's trained scorers: none, of something else, of a model of other sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

import mmaccel
from mmaccel.errors import UnsupportedModelError
from tests.fixtures.tiny_lms import build_lm
from tests.layers.test_kvzap_scorer import make_networks, write
from tests.messages.case import Refused


def _open(put: Callable[[Path], Any], name: str = "") -> Callable[[], None]:
    """A scorer of a folder in which something was put, or of a file there."""

    def call() -> None:
        with TemporaryDirectory() as folder:
            put(Path(folder))
            mmaccel.KVzap(scorer=str(Path(folder) / name))

    return call


def _save(tensors: dict[str, torch.Tensor]) -> Callable[[Path], None]:
    return lambda folder: save_file(tensors, folder / "model.safetensors")


def _attach(**sizes: int) -> Callable[[], None]:
    """The scorer of a model with these sizes, given to another."""

    def call() -> None:
        with TemporaryDirectory() as folder:
            scorer = write(Path(folder), make_networks("mlp", **sizes))
            mmaccel.attach(build_lm("qwen2"), "jacobi", kv_cache=mmaccel.KVzap(scorer=scorer))

    return call


CASES = (
    Refused(
        "no such scorer",
        lambda: mmaccel.KVzap(scorer="nvidia/KVzap-mlp-Qwen3-8B"),
        says=("KVzap.scorer: expected a file", "'nvidia/KVzap-mlp-Qwen3-8B'", "download"),
    ),
    Refused(
        "a folder without a scorer",
        _open(lambda folder: (folder / "config.json").write_text("{}")),
        says=("KVzap.scorer: expected a file", "model.safetensors", "download"),
    ),
    Refused(
        "a file of other tensors",
        _open(_save({"model.embed_tokens.weight": torch.zeros(2, 2)})),
        says=("KVzap.scorer", "layers.0.weight", "1 tensors", "embed_tokens", "KVzap-mlp-Qwen3-8B"),
        error=UnsupportedModelError,
    ),
    *(
        Refused(
            f"a scorer of a model of other {name}",
            _attach(**{name: n}),
            says=("kv_cache", "2 layers of 2 key heads over 32", "for", str(n), "of this model"),
            error=UnsupportedModelError,
        )
        for name, n in (("layers", 3),)
    ),
)  # fmt: skip
