"""The two forwards of a decoder of transformers, for tests that run by both."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[False, True], ids=["model", "fused"])
def fused(request: pytest.FixtureRequest) -> bool:
    """`fused` of a `CausalLMWindow`: the model's own forward, then the fused decoder."""
    return bool(request.param)
