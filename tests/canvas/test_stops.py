"""Rows that end inside a block, and canvases shorter than one, change nothing that a pass sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mmaccel.errors import OptionError
from mmaccel.results import Generation
from mmaccel.samplers.canvas.lossless_unmask import LosslessUnmask
from mmaccel.samplers.canvas.stepwise import Stepwise
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from tests.fixtures.canvas import PROMPTS, Recorded, masked, prompt_of, run

LENGTH, BLOCK = 12, 4
STOPS = torch.arange(0, 40, 6)


def stopped(policy: Any, model: Recorded, seed: int) -> Generation:
    """A run over the prompts that some tokens end."""
    prompt = replace(prompt_of(PROMPTS), stop_tokens=STOPS)
    noise = Noise.from_seed(seed, len(PROMPTS))
    made: Generation = policy.sample(model, prompt, LENGTH, params=SamplingParams(), noise=noise)
    return made


def same(one: Generation, other: Generation) -> bool:
    return torch.equal(one.tokens, other.tokens) and torch.equal(one.lengths, other.lengths)


def test_the_block_causal_cache_is_exact_after_a_stop_token() -> None:
    """Open slots between a stop token and the end of its block are still attended to."""
    plain, model = masked(block=BLOCK), masked(block=BLOCK)
    shorter = 0
    for seed in range(6):
        expected = stopped(Stepwise(), plain, seed)
        made = stopped(Stepwise(cache="block"), model, seed)
        assert same(made, expected)
        shorter += int((expected.lengths % BLOCK > 0).sum())
    assert shorter > 5  # rows that ended inside a block


@pytest.mark.parametrize("order, block", [("left", None), ("left", BLOCK), ("halton", None)])
def test_slots_closed_by_a_wrong_draft_are_guessed_anew(order: str, block: int | None) -> None:
    """A draft that stops a row too early has no guess for later slots; the next one needs it."""
    model = masked()
    for seed in (1, 6, 22):
        expected = stopped(Stepwise(order, block), model, seed)
        assert same(stopped(LosslessUnmask(4, order, block), model, seed), expected), seed


@pytest.mark.parametrize("cache", ["none", "dual", "block"])
def test_a_canvas_longer_than_the_model_is_refused_before_the_first_pass(cache: str) -> None:
    model = masked(block=BLOCK)
    longest = max(map(len, PROMPTS))
    policy = Stepwise(cache=cache, block=BLOCK if cache == "dual" else None)
    assert run(policy, model, 96 - longest).stats.passes == 96 - longest  # the most that fits
    model.passes = 0
    with pytest.raises(OptionError):
        run(policy, model, 100)
    assert model.passes == 0
