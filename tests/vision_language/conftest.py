"""Tiny models of all classes, and which columns of a prompt reduced calls keep."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from mmaccel.pipelines.hosts.vision_language import visual_call
from tests.fixtures.lanes import mostly_slow
from tests.fixtures.tiny_vlms import CONFIGS, shared_vlm


@pytest.fixture(params=mostly_slow(CONFIGS, "llava_next", "qwen3_vl", "idefics3", "gemma3"))
def named(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """The name of a class, and a model of it, which tests leave as it was."""
    return request.param, shared_vlm(request.param)


@pytest.fixture
def stays(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The columns that each reduced call keeps."""
    found, keep = [], visual_call.keep_columns

    def record(call: Any, kept: Tensor) -> Any:
        found.append(kept)
        return keep(call, kept)

    monkeypatch.setattr(visual_call, "keep_columns", record)
    return found
