"""Frustratingly simple decoding against a table of n-grams kept by plain loops."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import Autoregressive, FrustratinglySimple, Jacobi, Speculative
from mmaccel.policies import Policy
from tests.fixtures.toy_models import ToyLanguage, sample

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


@pytest.mark.parametrize(
    "policy", [Autoregressive(), Jacobi(3, "random"), Speculative(3)], ids=repr
)
def test_policies_make_the_greedy_text_under_it(policy: Policy) -> None:
    """`tests/exactness/test_repetition_distribution.py` has the distribution under such a rule."""
    language, rule = ToyLanguage(3, seed=1), FrustratinglySimple(alpha=0.5, n=2, top_k=2)
    text = [1, 1]
    for _ in range(12):
        scores = by_hand(language.logits_of(text), text, rule)
        text.append(scores.index(max(scores)))
    assert len({*text}) > 1
    made = sample(policy, language, [[1, 1]], 12, temperature=0.0, processor=rule.over_window)
    assert made.tokens[0].tolist() == text[2:]
