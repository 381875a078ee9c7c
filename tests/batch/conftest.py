"""Models are loaded once for all tests of this folder."""

from pathlib import Path

import pytest

from tests.fixtures.jobs import PROMPTED, Command, load_once  # noqa: F401

OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in PROMPTED[1:]]


@pytest.fixture(params=[PROMPTED[0], *OTHERS])
def command(request: pytest.FixtureRequest, tmp_path: Path) -> Command:
    """A command that takes prompt files; all of them share the job."""
    return Command(request.param, tmp_path)


@pytest.fixture
def images(tmp_path: Path) -> Command:
    """One of them, for what all share."""
    return Command("images", tmp_path)
