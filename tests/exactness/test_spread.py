"""Arithmetic sampling: each sample has the right distribution, and together they are spread evenly.

That windows give the plain loop's tokens is in the matrix (`bitwise_runs.OPTIONS`, "spread").
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import Autoregressive, Jacobi, Noise, SamplingParams
from mmaccel.evaluation.exactness.g_test import count_sequences, g_test, power
from mmaccel.policies import Policy
from tests.exactness.bitwise_runs import code_by_hand
from tests.fixtures.lanes import every
from tests.fixtures.toy_distribution import LEVEL, POWER, SAMPLES, VISIBLE, Setting
from tests.fixtures.toy_models import ToyLanguage, make_prompt

LENGTH = 4
PROMPT = [1, 2]


def decode(policy: Policy, noise: Noise, **options: Any) -> Tensor:
    """`[B, L]` tokens of one prompt in a language of three tokens."""
    made = policy.sample(
        ToyLanguage(3, seed=1, spread=0.8),
        make_prompt([PROMPT] * len(noise.items)),
        LENGTH,
        params=SamplingParams(**options),
        noise=noise,
    )
    return made.tokens


def chances() -> dict[tuple[int, ...], float]:
    """The probability of every beginning of a sample."""
    model = ToyLanguage(3, seed=1, spread=0.8)
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for slot in range(LENGTH):
        for text in itertools.product(range(3), repeat=slot):
            scores = model.logits_of([*PROMPT, *text])
            total = sum(map(math.exp, scores))
            for token, score in enumerate(scores):
                found[(*text, token)] = found[text] * math.exp(score) / total
    return found


@pytest.mark.parametrize(
    ("policy", "n"), every(2, [(Autoregressive(), 4), (Jacobi(3, "random"), 30)])
)
def test_one_item_of_many_seeds_has_the_right_distribution(policy: Policy, n: int) -> None:
    seeds = torch.arange(SAMPLES)
    noise = Noise(seeds, seeds % n)
    setting = Setting(length=LENGTH, spread=0.8)
    test = g_test(count_sequences(decode(policy, noise, spread=n), 3), setting.distributions[0])
    assert power(VISIBLE, SAMPLES, test.degrees, LEVEL) >= POWER
    assert test.p_value >= LEVEL, test


def counts(n: int, **options: Any) -> list[tuple[int, float]]:
    """How often each beginning is drawn that is due at least once, and how often it should be."""
    made = decode(Jacobi(2, "random"), Noise.from_seed(7, n), **options).tolist()
    texts = {text: p for text, p in chances().items() if p > 1 / n}
    assert any(len(text) > 1 for text in texts)
    return [
        (sum(tuple(row[: len(text)]) == text for row in made), n * p) for text, p in texts.items()
    ]


@pytest.mark.parametrize("n", [8, 300])
def test_no_beginning_is_drawn_more_or_less_often_than_it_must_be(n: int) -> None:
    for count, due in counts(n, spread=n):
        assert math.floor(due) <= count <= math.ceil(due)
    assert n == 8 or any(abs(count - due) > 1 for count, due in counts(n))  # independent rows


def test_a_code_is_a_function_of_seed_and_item() -> None:
    noise = Noise(torch.tensor([5, 5, -3, 5]), torch.tensor([0, 3, 2, 7]))
    wanted = [code_by_hand(5, 4, 0), code_by_hand(5, 4, 3), code_by_hand(-3, 4, 2)]
    assert noise.codes(4).tolist() == pytest.approx([*wanted, code_by_hand(5, 4, 3)], abs=1e-12)
