"""Servers that really listen, on this machine alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from mmaccel.batch.modalities import Images
from mmaccel.serving.engine import Engine
from mmaccel.serving.routes import ImageRoute
from mmaccel.serving.settings import ServerSettings
from tests.serving.running import Running

Start = Callable[..., Running]


@pytest.fixture
def reachable() -> tuple[str, ...]:
    """This machine."""
    return ("127.0.0.1",)


@pytest.fixture(scope="module")
def route(tiny_folder: Path) -> ImageRoute:
    """The tiny model."""
    return ImageRoute(Images(model=str(tiny_folder)))


@contextmanager
def run_server(route: Any, **options: Any) -> Iterator[Running]:
    """A server of a tiny model, on a free port."""
    running = Running(Engine(route, ServerSettings(name="tiny", port=0, **options)))
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
def start(route: ImageRoute) -> Iterator[Start]:
    """Starts servers of the tiny model; they end with the test."""
    with ExitStack() as running:
        yield lambda **options: running.enter_context(run_server(route, **options))


@pytest.fixture
def server(start: Start) -> Running:
    """A server of the tiny model."""
    return start()
