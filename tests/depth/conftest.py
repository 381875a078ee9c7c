"""Each tiny speech model once for all tests, which leave it as it was."""

from __future__ import annotations

from functools import cache

import pytest

from tests.depth.models import MODELS, Speech


@cache
def open_speech(name: str) -> Speech:
    return MODELS[name]()


SLOW = "qwen3-tts talker"  # whose kind is that of Qwen3-Omni's talker and a layer more


@pytest.fixture(
    params=[n if n != SLOW else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def speech(request: pytest.FixtureRequest) -> Speech:
    return open_speech(request.param)


@pytest.fixture
def csm() -> Speech:
    return open_speech("csm")
