"""Prompts with images under the policies: the tokens of transformers' own `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.handle import family_of
from mmaccel.pipelines.causal_lm.model import CausalLMWindow
from tests.fixtures.tiny_vlms import (
    build_vlm,
    draw_prompts,
    draw_videos,
    encodes_first,
)

N_NEW = 12
GREEDY = dict(max_new_tokens=N_NEW, do_sample=False)
SAMPLED = dict(max_new_tokens=N_NEW, do_sample=True, temperature=1.1, top_k=40)


@pytest.mark.parametrize("per_row", [(2, 0, 1), (1,), (0, 3)], ids=str)
def test_greedy_tokens_are_those_of_generate(named: tuple[str, Any], per_row: tuple[int, ...]):
    name, model = named
    inputs = draw_prompts(name, model, per_row)
    own = model.generate(**inputs, **GREEDY)
    for policy in (mmaccel.Autoregressive(), mmaccel.Jacobi(5), mmaccel.Speculative()):
        with mmaccel.attach(model, policy, strict=True) as run:
            made = model.generate(**inputs, **GREEDY)
        assert torch.equal(made, own)
        assert run.stats.fallbacks == [] and run.stats.prefill_passes == 1


def test_an_image_changes_the_answer(named: tuple[str, Any]) -> None:
    """Otherwise the tests here would say nothing of images."""
    name, model = named
    first, second = (draw_prompts(name, model, (1, 1, 1), seed) for seed in (1, 2))
    second |= {key: first[key] for key in first if key not in ("pixel_values",)}
    with mmaccel.attach(model, mmaccel.Jacobi(5), strict=True):
        assert not torch.equal(
            model.generate(**first, **GREEDY), model.generate(**second, **GREEDY)
        )


def test_sampled_tokens_are_those_of_the_plain_loop(named: tuple[str, Any]) -> None:
    name, model = named
    inputs, made = draw_prompts(name, model), []
    for policy in (mmaccel.Autoregressive(), mmaccel.Jacobi(5)):
        with mmaccel.attach(model, policy, seed=3, strict=True):
            made.append(model.generate(**inputs, **SAMPLED))
    assert torch.equal(*made)


@pytest.mark.parametrize("name", ["llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_videos(name: str) -> None:
    """Under a policy the library's tokens; with fewer visual tokens the policies agree."""
    if name == "llava_onevision" and not encodes_first():
        pytest.skip("this transformers gives the features of its videos in another form")
    model = build_vlm(name)
    frames = (3, 3) if name == "llava_onevision" else (3, 1)
    inputs = draw_videos(name, model, frames)
    own = model.generate(**inputs, **GREEDY)
    methods = (mmaccel.EVS(keep=0.5), mmaccel.VidCom2(keep=0.5), mmaccel.FastV(keep=0.5))
    for method in (None, *(methods if encodes_first() else ())):
        made = []
        for policy in (mmaccel.Autoregressive(), mmaccel.Jacobi(5)):
            with mmaccel.attach(model, policy, strict=True, visual_tokens=method) as run:
                made.append(model.generate(**inputs, **GREEDY))
        assert torch.equal(*made)
        assert method is not None or torch.equal(made[0], own)
        assert bool(run.stats.reference) == (method is not None)


def test_rows_do_not_see_their_batch(named: tuple[str, Any]) -> None:
    """Three rows with images together are the rows alone, whatever the padding."""
    name, model = named
    together = draw_prompts(name, model, (2, 0, 1))
    with mmaccel.attach(model, mmaccel.Jacobi(5), strict=True):
        made = model.generate(**together, **GREEDY)[:, -N_NEW:]
        alone = draw_prompts(name, model, (2,))  # the same first row: words and images in order
        assert torch.equal(model.generate(**alone, **GREEDY)[0, -N_NEW:], made[0])


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_positions_of_generated_tokens_go_on_after_the_grid(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: counted from the prompt's length, as text is. The tokens are others then."""
    model = build_vlm(name)
    inputs = draw_prompts(name, model, (1, 1, 1))
    own = model.generate(**inputs, **GREEDY)
    monkeypatch.setattr(
        CausalLMWindow, "position_ids",
        lambda self, positions: positions.clamp(max=self._positions - 1),
    )  # fmt: skip
    with mmaccel.attach(model, mmaccel.Jacobi(5), strict=True):
        assert not torch.equal(model.generate(**inputs, **GREEDY), own)


def test_a_model_that_is_not_listed_says_what_was_looked_for() -> None:
    model = build_vlm("llava")
    model.config.model_type = "other_vlm"
    inputs = draw_prompts("llava", model, (1,))
    assert family_of(model).name == "causal_lm"
    with pytest.warns(UserWarning, match="pixel_values|mm_encoder_outputs"):
        with mmaccel.attach(model, mmaccel.Jacobi(5)) as run:
            made = model.generate(**inputs, **GREEDY)
    assert made.shape[1] == inputs["input_ids"].shape[1] + N_NEW and run.stats.fallbacks


@pytest.mark.skipif(encodes_first(), reason="this transformers encodes images before its loop")
def test_reducers_ask_for_a_newer_transformers() -> None:
    with pytest.raises(mmaccel.UnsupportedModelError, match="install transformers 5.23"):
        mmaccel.attach(
            build_vlm("llava"), mmaccel.Jacobi(4), visual_tokens=mmaccel.DivPrune(keep=0.5)
        )
