"""Shared by the tests of the nodes: a fake ComfyUI, the kinds of runs, and their loaded models."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from mmaccel.comfy import host
from tests.comfy.fake_comfy import FakeComfy, install
from tests.comfy.kinds import KINDS, Kind, build_kind


@pytest.fixture(scope="session")
def _fake() -> Iterator[FakeComfy]:
    with pytest.MonkeyPatch.context() as patch:
        host._execution.cache_clear()
        yield install(patch)
    host._execution.cache_clear()


@pytest.fixture(autouse=True)
def comfy(_fake: FakeComfy) -> FakeComfy:
    _fake.reset()
    return _fake


@pytest.fixture(scope="session")
def kind_of(_fake: FakeComfy, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kind]:
    """A kind of runs by its word, built once."""
    made: dict[str, Kind] = {}

    def build(word: str) -> Kind:
        if word not in made:
            made[word] = build_kind(word, tmp_path_factory.mktemp(word))
        return made[word]

    return build


IMAGES, *OTHERS = KINDS


@pytest.fixture(params=[IMAGES, *(pytest.param(word, marks=pytest.mark.slow) for word in OTHERS)])
def kind(request: pytest.FixtureRequest, kind_of: Callable[[str], Kind]) -> Kind:
    return kind_of(request.param)


@pytest.fixture
def images(kind_of: Callable[[str], Kind]) -> Kind:
    return kind_of("Images")


@pytest.fixture
def vqa(kind_of: Callable[[str], Kind]) -> Kind:
    return kind_of("Vision")
