"""Which models are drafted as text where a call has no layout."""

from __future__ import annotations

import pytest
import torch

import mmaccel
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.windows import LENGTHS, build_model, prompts


@pytest.fixture
def fixed_widths() -> None:
    """Not here: it says that no model is one of text."""


def test_a_language_model_is_one_of_text() -> None:
    model = build_lm("llama")
    with mmaccel.attach(model, mmaccel.Jacobi(5), strict=True) as run:
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    assert run.stats.drafts == "suffix"


@pytest.mark.parametrize("name", ["imagegpt", "chameleon"])
def test_codes_of_images_are_no_text(name: str) -> None:
    """Longest matches drafted nothing for them: a pass a token, where own predictions make 1.5."""
    model = build_model(name)
    given = {"max_new_tokens": LENGTHS.get(name, 24), "do_sample": False}
    with mmaccel.attach(model, mmaccel.Jacobi(5), strict=True) as run:
        model.generate(**prompts(name, [[26, 27, 28, 29]]), **given)
    assert run.stats.drafts != "suffix"
