"""For all tests: uninitialised memory is poisoned, the network is closed, torch has one thread, and
variables, locale and signals of the caller have no effect.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_CALLERS = ("COLUMNS", "LINES", "TERM", "COLORTERM", "FORCE_COLOR", "NO_COLOR", "LANG", "LANGUAGE")
_CALLERS_PREFIXES = ("MMACCEL_", "HF_", "LC_")
_SWITCHES = ("MMACCEL_COMPILE",)  # of tests, not of the library

# before anything is imported that reads them; processes that tests start inherit this
for name in list(os.environ):
    if name in _CALLERS or (name.startswith(_CALLERS_PREFIXES) and name not in _SWITCHES):
        del os.environ[name]
os.environ["LC_ALL"] = "C.UTF-8"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models gain nothing from more

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a run in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch

import mmaccel
from tests.architecture.source import TOP_FOLDERS
from tests.fixtures.forking import Forker
from tests.fixtures.shared import image_folder, media_folders
from tests.fixtures.speech import FAMILIES
from tests.fixtures.tiny_model import build_tiny

_FOLDERS = [Path(mmaccel.__file__).parent]
_FOLDERS += [Path(entry) / name for entry in mmaccel.__path__ for name in TOP_FOLDERS]
_SOURCES = tuple(str(folder.resolve()) + os.sep for folder in _FOLDERS)

with torch.device("cpu"):
    torch.empty(0)  # torch lists the functions that follow a device once: before they are replaced


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`allocate`, which fills its result with NaN or the lowest integer when mmaccel calls it."""

    def allocate_poisoned(*args: Any, **options: Any) -> torch.Tensor:
        tensor = allocate(*args, **options)
        caller = sys._getframe(1).f_code.co_filename
        if not caller.startswith(_SOURCES):
            return tensor
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            return tensor.fill_(float("nan"))
        return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min)

    return allocate_poisoned


@pytest.fixture(autouse=True)
def _poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty))


@pytest.fixture
def reachable() -> tuple[str, ...]:
    """Machines that tests may connect to."""
    return ()


@pytest.fixture(autouse=True)
def _close_sockets(reachable: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in reachable:
            raise RuntimeError(f"network: expected no connection in a test, received {address!r}")
        connect(self, address)

    connect = socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(autouse=True)
def fixed_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models of random weights are asked in whole windows, whose passes are counted; of texts
    drafts="auto" would choose widths by the clock.
    """
    from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow

    monkeypatch.setattr(CausalLMWindow, "is_text", False)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random text-to-image model on disk."""
    return build_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def forker(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    """Starts commands in processes of their own, with the tiny model."""
    with Forker(tiny_folder, tmp_path_factory.mktemp("forker")) as opened:
        yield opened


@pytest.fixture(scope="session")
def speech_folders() -> dict[str, tuple[Path, Path]]:
    """Folders of a tiny speech model and of its codec, by family. Tests must not change them."""
    return {name: media_folders(name) for name in FAMILIES}


@pytest.fixture(scope="session")
def built() -> Callable[[str], Path]:
    """Folder of an image family's tiny checkpoint, built once. Tests must not change it."""
    return image_folder
