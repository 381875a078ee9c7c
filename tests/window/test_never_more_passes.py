"""Passes are never more than the plain run's, on any input: random models, calls and policies."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.catalog import make_policy
from tests.fixtures.tiny_lms import EOS, VOCAB, PassCounter, build_lm, left_padded

LENGTH = 14


def _case(seed: int) -> tuple[Any, str, int, dict[str, Any]]:
    """A model, a policy's name, a window, and arguments of `generate`."""
    pick = random.Random(seed)
    model = build_lm("llama", initializer_range=pick.choice([0.02, 0.25, 0.6]))
    rows = [
        [pick.randrange(4, VOCAB) for _ in range(pick.randint(1, 7))]
        for _ in range(pick.randint(1, 4))
    ]
    name = pick.choice(["jacobi", "sjd", "mc-sjd", "gumbel-sjd", "prompt-lookup"])
    call: dict[str, Any] = dict(left_padded(rows)) | {"do_sample": True, "max_new_tokens": LENGTH}
    call["temperature"] = pick.choice([0.3, 1.0, 2.5])
    call["top_k"] = pick.choice([0, 1, 5])
    call["eos_token_id"] = pick.choice([EOS, [EOS, 5, 6, 7, 8, 9, 10, 11], -1])
    call |= pick.choice(
        [
            {},
            {"repetition_penalty": 1.6},
            {"suppress_tokens": list(range(20, VOCAB))},
            {"no_repeat_ngram_size": 2, "min_new_tokens": 5},
            {"guidance_scale": 1.7, "negative_prompt_ids": torch.full((len(rows), 2), 1)},
        ]
    )
    return model, name, pick.choice([1, 2, 5, 16, 40]), call


@pytest.mark.parametrize("seed", range(15))
def test_no_row_and_no_batch_takes_more_passes_than_tokens(seed: int) -> None:
    model, name, window, call = _case(seed)
    seeds = [seed * 10 + row for row in range(len(call["input_ids"]))]
    with mmaccel.attach(model, mmaccel.Autoregressive(), seed=seeds, strict=True) as run:
        plain = model.generate(**call)
    policy = make_policy(name, window=window)
    with PassCounter(model) as counter:
        with mmaccel.attach(model, policy, seed=seeds, strict=True) as own:
            made = model.generate(**call)
    assert run.stats is not None and own.stats is not None
    stats = own.stats
    assert counter.passes == stats.passes + stats.prefill_passes
    # a pass gives every unfinished row at least its next token: no row takes more than it has
    assert stats.row_passes == sum(stats.accepted) <= stats.tokens
    assert stats.passes <= made.shape[1] - call["input_ids"].shape[1]
    assert run.stats.row_passes == run.stats.tokens
    assert run.stats.passes == plain.shape[1] - call["input_ids"].shape[1]
    if policy.exactness == "bitwise":  # the same tokens: the plain run's own counts bound it
        assert torch.equal(made, plain)
        assert stats.row_passes <= run.stats.row_passes and stats.passes <= run.stats.passes
