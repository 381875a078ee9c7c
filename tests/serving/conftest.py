"""Servers that really listen, on this machine alone."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from mmaccel.batch.worker import Setup
from mmaccel.serving.engine import Backend
from mmaccel.serving.images import ImageBackend
from mmaccel.serving.service import Service
from mmaccel.serving.settings import ServerSettings
from tests.serving.running import Running

Start = Callable[..., Running]


@pytest.fixture(autouse=True)
def _close_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of that of all tests: connections to this machine are allowed."""

    def refuse(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] != "127.0.0.1":
            raise RuntimeError(f"network: expected no connection in a test, received {address!r}")
        connect(self, address)

    connect = socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module")
def backend(tiny_folder: Path) -> ImageBackend:
    """The tiny model."""
    made = ImageBackend(Setup(str(tiny_folder), Path()))
    made.warm_up()
    return made


@contextmanager
def run_server(backend: Backend, **options: Any) -> Iterator[Running]:
    """A server of a tiny model, on a free port."""
    settings = ServerSettings(name="tiny", port=0, **options)
    running = Running(Service(settings, backend))
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
def start(backend: ImageBackend) -> Iterator[Start]:
    """Starts servers of the tiny model; they end with the test."""
    with ExitStack() as running:
        yield lambda **options: running.enter_context(run_server(backend, **options))


@pytest.fixture
def server(start: Start) -> Running:
    """A server of the tiny model."""
    return start()
