"""Models are loaded once for all tests of this folder; most tests use the same one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from mmaccel import loading
from tests.batch.jobs import Jobs

_open_once = cache(loading.open_pipeline)


@pytest.fixture(autouse=True, scope="session")
def _load_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "open_pipeline", _open_once)
        yield


@pytest.fixture
def jobs(tmp_path: Path, tiny_folder: Path) -> Jobs:
    """Jobs into a new folder."""
    return Jobs(tmp_path, tiny_folder)


@pytest.fixture(scope="session")
def whole(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed job."""
    undisturbed = Jobs(tmp_path_factory.mktemp("whole"), tiny_folder)
    assert undisturbed.run() == 0
    return undisturbed.out
