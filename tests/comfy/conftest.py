"""Shared by the tests of the nodes: a fake ComfyUI, the kinds of runs, and their loaded models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mmaccel.comfy.loading import LoadedModel
from tests.comfy.fake_comfy import FakeComfy, install, run
from tests.comfy.kinds import Kind, build_images, build_kind
from tests.fixtures.tiny_model import build_tiny


@pytest.fixture
def comfy(monkeypatch: pytest.MonkeyPatch) -> FakeComfy:
    return install(monkeypatch)


@pytest.fixture(scope="session")
def model(tiny_folder: Path) -> LoadedModel:
    loaded: LoadedModel = run("LoadModel", model=str(tiny_folder)).values[0]
    return loaded


@pytest.fixture(scope="session")
def kind_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kind]:
    """A kind of runs by its loader's word, built once."""
    made: dict[str, Kind] = {}

    def build(word: str) -> Kind:
        if word not in made:
            folder = tmp_path_factory.mktemp(word or "Images")
            own = build_kind(word, folder) if word else build_images(build_tiny(folder))
            made[word] = own
        return made[word]

    return build


@pytest.fixture(scope="session")
def loaded(kind_of: Callable[[str], Kind]) -> Callable[[Kind], LoadedModel]:
    """The loaded model of a kind, which stays loaded."""
    made: dict[str, LoadedModel] = {}

    def load(kind: Kind) -> LoadedModel:
        if kind.word not in made:
            made[kind.word] = kind.load()
        return made[kind.word]

    return load


@pytest.fixture(
    params=["", "Speech", "TextToVideo", "Video", "Vision"], ids=lambda word: word or "Images"
)
def kind(request: pytest.FixtureRequest, kind_of: Callable[[str], Kind]) -> Kind:
    return kind_of(request.param)
