"""Sampling arguments of a `LLaDA2Pipeline` call, as canvas policies read them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.pipelines.diffusion_lm.llada2.canvas import read_params
from mmaccel.samplers.canvas.stepwise import Stepwise
from mmaccel.samplers.sampling_params import SamplingParams
from tests.fixtures.llada2 import build_pipe

PROMPTS = ["hello there", "abc", "a longer prompt than the others"]
OPTIONS: dict[str, Any] = {"gen_length": 12, "eos_early_stop": False, "temperature": 1.0}
USUAL = {"temperature": 0.7, "top_k": None, "top_p": None, "sampling_method": "multinomial"}


@pytest.mark.parametrize(
    "given, params",
    [
        ({}, SamplingParams(temperature=0.7)),
        ({"top_k": 5}, SamplingParams(temperature=0.7, top_k=5)),
        ({"top_p": 0.8}, SamplingParams(temperature=0.7, top_p=0.8)),
        ({"top_k": 1, "top_p": 0.1}, SamplingParams(temperature=0.7, top_k=1, top_p=0.1)),
        (
            {"top_k": 0, "top_p": 1.0},
            SamplingParams(temperature=0.7),
        ),  # both off, as in the pipeline
        ({"top_k": -1, "top_p": 2.0}, SamplingParams(temperature=0.7)),
        ({"sampling_method": "auto"}, SamplingParams(temperature=0.7)),
        ({"sampling_method": "greedy", "top_k": 5}, SamplingParams(temperature=0.0, top_k=5)),
        ({"temperature": 0.0}, SamplingParams(temperature=0.0)),
    ],
)
def test_arguments_are_read_as_the_pipeline_means_them(
    given: dict[str, Any], params: SamplingParams
) -> None:
    assert read_params({**USUAL, **given}) == params


def made_with(pipe: Any, seed: int = 4, **options: Any) -> Tensor:
    with mmaccel.attach(pipe, Stepwise(cache="block"), seed=seed, strict=True):
        made: Tensor = pipe(**{**OPTIONS, **options}, prompt=PROMPTS).sequences
    return made


def test_truncation_reaches_the_draws() -> None:
    """What leaves one token leaves the likeliest; what leaves all leaves the draws alone."""
    pipe = build_pipe("refused")
    greedy, free = made_with(pipe, sampling_method="greedy"), made_with(pipe)
    assert not torch.equal(greedy, free)
    for one in ({"top_k": 1}, {"top_p": 1e-6}, {"top_k": 1, "top_p": 0.9}, {"temperature": 0.0}):
        assert torch.equal(made_with(pipe, **one), greedy), one
    for every in ({"top_k": 41}, {"top_k": 0}, {"top_p": 1.0}, {"sampling_method": "auto"}):
        assert torch.equal(made_with(pipe, **every), free), every


def test_each_truncation_makes_other_tokens_than_none_and_than_the_other() -> None:
    pipe = build_pipe("refused")
    options: list[dict[str, Any]] = [
        {}, {"top_k": 3}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.5}, {"temperature": 0.3}
    ]  # fmt: skip
    made = [made_with(pipe, **given) for given in options]
    for k, tokens in enumerate(made):
        assert not any(torch.equal(tokens, other) for other in made[:k]), options[k]
