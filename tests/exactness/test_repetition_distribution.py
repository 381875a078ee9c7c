"""Repetition-aware sampling: its closed form against its two steps.

Power: 50 000 draws each, rejected at p < 1e-4; a deviation of 0.03 in total variation is rejected
with probability 0.99 or more, as asserted for the degrees of freedom at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mmaccel import (
    Autoregressive,
    Jacobi,
    RepetitionAwareSampling,
    Speculative,
    SpeculativeJacobi,
)
from mmaccel.evaluation.exactness.g_test import GTest, count_sequences, g_test, power
from mmaccel.policies import Policy
from tests.fixtures.lanes import every
from tests.fixtures.toy_distribution import LEVEL, POWER, SAMPLES, VISIBLE
from tests.fixtures.toy_models import ToyLanguage, sample

VOCAB = 8
RECENT = [6, 1, 2, 1, 5, 0, 1, 2]
RULES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "half a window": {"window": 4, "share": 0.5, "top_p": 0.95},
    "a third, rounded up": {"window": 5, "share": 0.3, "top_k": 4, "top_p": 1.0},
    "a narrow nucleus": {"top_p": 1e-6},
    "made only": {"start": 6, "top_p": 0.9},
    "others": {"redraw": "others", "top_p": 0.95},
    "others, a narrow nucleus": {"redraw": "others", "top_p": 0.01, "window": 7},
}


def _steps(
    scores: list[float], prefix: list[int], rule: RepetitionAwareSampling
) -> tuple[dict[int, float], Callable[[int], bool], list[float]]:
    """The nucleus' weights, what is repeated and the full distribution, by plain loops."""
    total = sum(math.exp(score) for score in scores)
    full = [math.exp(score) / total for score in scores]
    nucleus: dict[int, float] = {}
    for token in sorted(range(len(full)), key=lambda v: (-full[v], v)):
        if sum(nucleus.values()) >= rule.top_p or len(nucleus) >= rule.top_k:
            break
        nucleus[token] = full[token]
    recent = prefix[rule.start :][-rule.window :]
    return nucleus, lambda y: recent.count(y) >= rule.window * rule.share, full


def _distribution_by_hand(
    scores: list[float], prefix: list[int], rule: RepetitionAwareSampling
) -> list[float]:
    """Every first draw, and after a discarded one every second draw."""
    nucleus, is_repeated, full = _steps(scores, prefix, rule)
    distribution, total = [0.0] * len(full), sum(nucleus.values())
    for first, weight in nucleus.items():
        second = [p * (rule.redraw == "all" or v != first) for v, p in enumerate(full)]
        if not is_repeated(first):
            second = [float(v == first) for v in range(len(full))]
        for token, p in enumerate(second):
            distribution[token] += weight / total * p / sum(second)
    return distribution


def _scores(seed: int) -> list[float]:
    return (1.5 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))).tolist()


def _closed(scores: list[float], prefix: list[int], rule: RepetitionAwareSampling) -> torch.Tensor:
    return rule(torch.tensor([prefix]), torch.tensor([scores]))[0].double().exp()


def _test(made: torch.Tensor, vocab_size: int, distribution: torch.Tensor) -> GTest:
    test = g_test(count_sequences(made, vocab_size), distribution / distribution.sum())
    assert power(VISIBLE, len(made), test.degrees, LEVEL) >= POWER, test
    return test


@pytest.mark.parametrize("options", RULES.values(), ids=RULES)
def test_the_closed_form_is_the_sum_over_both_draws(options: dict[str, Any]) -> None:
    rule = RepetitionAwareSampling(**options)
    thrown = 0
    for seed in range(40):
        scores, prefix = _scores(seed), RECENT[: seed % 9]  # from no token at all on
        expected = torch.tensor(_distribution_by_hand(scores, prefix, rule), dtype=torch.float64)
        found = _closed(scores, prefix, rule)
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-7), (seed, found, expected)
        assert torch.equal(found > 0, expected > 0)
        nucleus, is_repeated, _ = _steps(scores, prefix, rule)
        thrown += any(map(is_repeated, nucleus))
    assert 5 <= thrown < 40  # with and without a second draw


def test_another_rule_has_another_distribution() -> None:
    scores = _scores(11)
    right = _closed(scores, RECENT, RepetitionAwareSampling(top_p=0.95))
    for other in ({"redraw": "others"}, {"share": 0.2}, {"window": 4}, {"top_k": 2}, {"start": 6}):
        closed = _closed(scores, RECENT, RepetitionAwareSampling(**({"top_p": 0.95} | other)))
        assert not torch.allclose(closed, right, rtol=1e-4, atol=1e-7)


def test_the_lowest_ids_win_a_tie() -> None:
    for size in (5, 3000):
        closed = _closed([0.0] * size, [], RepetitionAwareSampling(top_k=3))
        assert closed.nonzero()[:, 0].tolist() == [0, 1, 2]


def test_a_certain_token_stays() -> None:
    """Nothing is left to redraw from; and a token that rounds to 1 is thrown away all the same."""
    rule = RepetitionAwareSampling(redraw="others")
    certain = [0.0, -math.inf, -math.inf]
    assert _closed(certain, [0], rule).tolist() == [1.0, 0.0, 0.0]
    almost = _closed([40.0, 1.0, 0.0], [0], rule)
    assert almost[0] == 0 and torch.allclose(
        almost[1:], torch.tensor([1.0, 0.0]).softmax(0).double()
    )


LAW = RepetitionAwareSampling(top_p=0.7, window=3, share=0.4, start=2)  # two of the last three
POLICIES: list[Policy] = [
    Autoregressive(),
    Jacobi(3, "random"),
    SpeculativeJacobi(3, "maximal"),
    Speculative(3),
]


@pytest.mark.parametrize("policy", every(4, POLICIES), ids=repr)
def test_policies_stay_exact_under_it(policy: Policy) -> None:
    model, length, prompt = ToyLanguage(3, seed=1), 5, [1, 1]
    distribution = {(): 1.0}
    for _ in range(length):
        distribution = {
            (*made, token): p * share
            for made, p in distribution.items()
            for token, share in enumerate(
                _distribution_by_hand(model.logits_of([*prompt, *made]), [*prompt, *made], LAW)
            )
        }
    made = sample(policy, model, [prompt] * SAMPLES, length, processor=LAW.over_window)
    test = _test(made.tokens, 3, torch.tensor(list(distribution.values()), dtype=torch.float64))
    assert test.p_value >= LEVEL, test
