"""A tiny pipeline for all tests, which leave it as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmaccel import TextToImage


@pytest.fixture(scope="session")
def pipe(tiny_folder: Path) -> TextToImage:
    return TextToImage.from_pretrained(tiny_folder)
