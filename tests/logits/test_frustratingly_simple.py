"""Frustratingly simple decoding against a table of n-grams kept by plain loops."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import (
    Autoregressive,
    FrustratinglySimple,
    Jacobi,
    Noise,
    SamplingParams,
    Speculative,
    SpeculativeJacobi,
)
from mmaccel.evaluation.exactness.g_test import count_sequences, g_test, power
from mmaccel.policies import Policy
from tests.fixtures.toy_distribution import LEVEL, POWER, SAMPLES, VISIBLE
from tests.fixtures.toy_models import ToyLanguage, make_prompt

VOCAB = 7
RULES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "trigrams": {"n": 3, "top_k": 5},
    "single tokens": {"n": 1, "alpha": 0.7, "top_k": 4},
    "all tokens, long contexts": {"n": 5, "alpha": 0.9, "top_k": VOCAB, "beta": 0.5},
    "no penalty": {"alpha": 0.0},
    "the longest context alone": {"beta": 1.0, "n": 3},
}


def by_hand(scores: list[float], prefix: list[int], rule: FrustratinglySimple) -> list[float]:
    """The scores after one prefix; -1 in it is padding."""
    text = [token for token in prefix if token >= 0]
    table: list[defaultdict[tuple[int, ...], Counter[int]]] = []
    for back in range(rule.n):
        table.append(defaultdict(Counter))
        for end in range(back, len(text)):
            table[back][tuple(text[end - back : end])][text[end]] += 1
    total = sum(map(math.exp, scores))
    p = [math.exp(score) / total for score in scores]
    least = sorted(p)[-min(rule.top_k, len(p))]
    found = []
    for token, own in enumerate(p):
        left, penalty = 1.0, 0.0
        for back in range(rule.n - 1, -1, -1):
            if back > len(text):
                continue
            counts = table[back][tuple(text[len(text) - back :])]
            if not counts[token]:
                continue
            share = counts[token] / sum(counts.values())
            if back:
                share = rule.beta * counts[token] / (sum(counts.values()) + 1)
            penalty += left * share
            left *= 1 - rule.beta
        mixed = (1 - rule.alpha) * own - rule.alpha * penalty
        found.append(mixed if own >= least else -math.inf)
    return found


def scene(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores `[2, 4, V]`, tokens `[2, N]` that repeat, and columns `[2, 4]` from 0 on."""
    random = torch.Generator().manual_seed(seed)
    scores = 1.5 * torch.randn(2, 4, VOCAB, generator=random, dtype=torch.float64)
    tokens = torch.randint(0, 3, (2, 14), generator=random)
    tokens[1, :2] = -1
    return scores, tokens, torch.tensor([[0, 1, 2, 3], [10, 11, 12, 13]]) + seed % 2


@pytest.mark.parametrize("options", RULES.values(), ids=RULES)
def test_scores_are_those_of_the_table(options: dict[str, Any]) -> None:
    rule = FrustratinglySimple(**options)
    n_moved = 0
    for seed in range(12):
        scores, tokens, columns = scene(seed)
        found = rule.over_window(scores, tokens, columns)
        for row in range(2):
            for w in range(4):
                prefix = tokens[row, : int(columns[row, w])].tolist()
                wanted = by_hand(scores[row, w].tolist(), prefix, rule)
                assert found[row, w].tolist() == pytest.approx(wanted, abs=1e-6)
                n_moved += int(found[row, w].argmax()) != int(scores[row, w].argmax())
    assert (n_moved > 0) == (rule.alpha > 0)


def test_a_call_is_a_window_of_one() -> None:
    scores, tokens, _ = scene(2)
    rule = FrustratinglySimple(n=3)
    ends = torch.tensor([[14], [14]])
    wanted = rule.over_window(scores[:, :1], tokens, ends)[:, 0]
    assert torch.equal(rule(tokens, scores[:, 0]), wanted)


LANGUAGE = ToyLanguage(3, seed=1)
RULE = FrustratinglySimple(alpha=0.5, n=2, top_k=2)
POLICIES: list[Policy] = [
    Autoregressive(), Jacobi(3, "random"), SpeculativeJacobi(3, "maximal"), Speculative(3),
]  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_policies_stay_exact_under_it(policy: Policy, temperature: float) -> None:
    """At temperature 0 the tokens of the plain loop, else its distribution."""
    length, prompt = 5, [1, 1]
    chances = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for made, p in chances.items():
            text = [*prompt, *made]
            scores = by_hand(LANGUAGE.logits_of(text), text, RULE)
            weights = [math.exp((score - max(scores)) / (temperature or 1e-6)) for score in scores]
            for token, weight in enumerate(weights):
                longer[(*made, token)] = p * weight / sum(weights)
        chances = longer
    n = SAMPLES if temperature else 4
    made = policy.sample(
        LANGUAGE,
        make_prompt([prompt] * n),
        length,
        params=SamplingParams(temperature=temperature, processor=RULE.over_window),
        noise=Noise.from_seed(0, n),
    ).tokens
    if not temperature:
        assert all(chances[tuple(row)] == 1.0 for row in made.tolist())
        return
    wanted = torch.tensor(list(chances.values()), dtype=torch.float64)
    test = g_test(count_sequences(made, 3), wanted / wanted.sum())
    assert power(VISIBLE, n, test.degrees, LEVEL) >= POWER
    assert test.p_value >= LEVEL, test
