"""Shared by the tests of evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmaccel import TextToImage


@pytest.fixture(scope="session")
def pipe(tiny_folder: Path) -> TextToImage:
    return TextToImage.from_pretrained(tiny_folder)
