"""For all tests: uninitialised memory is poison, the network is closed, threads are few."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models; threads that wait only get in the way

import pytest
import torch

import mmaccel
from tests.fixtures.checkpoints import build_checkpoint
from tests.fixtures.speech import FAMILIES, build_speech
from tests.fixtures.tiny_model import build_tiny

_FLOORS = ("kernels", "samplers", "pipelines", "tokenizers_vq")
_HOMES = [Path(mmaccel.__file__).parent]
_HOMES += [Path(entry) / floor for entry in mmaccel.__path__ for floor in _FLOORS]
_OURS = tuple(str(home.resolve()) + os.sep for home in _HOMES)


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`make`, filling its result with NaN (or the lowest integer) if the package asked for it."""

    def made(*args: Any, **options: Any) -> torch.Tensor:
        tensor = make(*args, **options)
        caller = sys._getframe(1).f_code.co_filename
        if not caller.startswith(_OURS):
            return tensor
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            return tensor.fill_(float("nan"))
        return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min)

    return made


@pytest.fixture(autouse=True)
def _poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty))


@pytest.fixture(autouse=True)
def _close_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:
            raise RuntimeError(f"network: expected no connection in a test, received {address!r}")
        connect(self, address)

    connect = socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random text-to-image model on disk."""
    return build_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def speech_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Paths of tiny models that speak and of their codecs, by family; not to be changed."""
    return {name: build_speech(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Path of an image family's tiny checkpoint, built once and not to be changed."""
    made: dict[str, Path] = {}

    def build(family: str) -> Path:
        if family not in made:
            made[family] = build_checkpoint(family, tmp_path_factory.mktemp(family))
        return made[family]

    return build
