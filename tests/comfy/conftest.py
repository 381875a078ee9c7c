"""Shared by the tests of the nodes: a fake ComfyUI, and a loaded tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmaccel.comfy.loading import LoadedModel
from tests.comfy.fake_comfy import FakeComfy, install, run


@pytest.fixture
def comfy(monkeypatch: pytest.MonkeyPatch) -> FakeComfy:
    return install(monkeypatch, with_v3=False)


@pytest.fixture(scope="session")
def model(tiny_folder: Path) -> LoadedModel:
    loaded: LoadedModel = run("LoadModel", model=str(tiny_folder)).values[0]
    return loaded
