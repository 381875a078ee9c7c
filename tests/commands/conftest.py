"""Models are loaded once for all tests of this folder."""

from tests.fixtures.jobs import load_once  # noqa: F401
