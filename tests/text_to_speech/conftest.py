"""A tiny `voices` for all tests, which leave it as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmaccel import TextToSpeech
from tests.fixtures.voices import build_voices


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_voices(tmp_path_factory.mktemp("voices"))


@pytest.fixture(scope="session")
def voices(folder: Path) -> TextToSpeech:
    return TextToSpeech.from_pretrained(folder)
