"""Models are loaded once for all tests of this folder."""

from pathlib import Path

import pytest

from tests.fixtures.jobs import PROMPTED, Command, load_once  # noqa: F401


@pytest.fixture(params=PROMPTED)
def command(request: pytest.FixtureRequest, tmp_path: Path) -> Command:
    """A command that takes prompt files."""
    return Command(request.param, tmp_path)


@pytest.fixture
def images(tmp_path: Path) -> Command:
    """One of them, for what all share."""
    return Command("images", tmp_path)
