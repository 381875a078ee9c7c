"""Prompts with images under the policies: the tokens of transformers' own `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.pipelines.hosts.attach.attaching import family_of
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from tests.fixtures.tiny_lms import falls_back
from tests.fixtures.tiny_vlms import build_vlm, draw_prompts, shared_vlm
from tests.vision_language.runs import GREEDY, N_NEW, answer


def test_greedy_tokens_are_those_of_generate(named: tuple[str, Any]) -> None:
    """Rows of two images, of none and of one."""
    name, model = named
    inputs = draw_prompts(name, model, (2, 0, 1))
    own = model.generate(**inputs, **GREEDY)
    for policy in (mmaccel.Jacobi(5), mmaccel.Speculative()):
        made, stats = answer(model, None, inputs, policy)
        assert torch.equal(made, own), policy
        assert stats.fallbacks == []


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_of_generated_tokens_go_on_after_the_grid(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: counted from the prompt's length, as text is. The tokens are others then."""
    model = shared_vlm(name)
    inputs = draw_prompts(name, model, (1, 1, 1))
    own = model.generate(**inputs, **GREEDY)
    monkeypatch.setattr(
        CausalLMWindow,
        "position_ids",
        lambda self, positions: positions.clamp(max=self.n_reserved - 1),
    )
    assert not torch.equal(answer(model, None, inputs, mmaccel.Jacobi(5))[0], own)


def test_a_model_that_is_not_listed_says_what_was_looked_for() -> None:
    model = build_vlm("llava")
    model.config.model_type = "other_vlm"
    inputs = draw_prompts("llava", model, (1,))
    assert family_of(model).name == "causal_lm"
    with falls_back(model, "pixel_values|mm_encoder_outputs"):
        made = model.generate(**inputs, **GREEDY)
    assert made.shape[1] == inputs["input_ids"].shape[1] + N_NEW
