"""Hierarchy drafting: the plain loop's tokens, in fewer passes where rows resemble each other.

Captured passes are proved beside the other sources in `test_graph_reuse.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from mmaccel import (
    Autoregressive,
    ContinuousBatching,
    HierarchyDrafting,
    Jacobi,
    Noise,
    SamplingParams,
)
from mmaccel.policies import Policy
from mmaccel.results import Generation
from tests.exactness.bitwise_runs import assert_same
from tests.exactness.test_continuous_batching import ALL, decode
from tests.fixtures.toy_models import ToyLanguage, make_prompt


@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_rows_come_and_go(scale: float) -> None:
    batching = ContinuousBatching(3)
    made = decode(Jacobi(6, HierarchyDrafting(ngram=1)), ALL, scale, batching)
    plain = decode(Autoregressive(), ALL, scale)
    assert_same(made, plain)


def generate(policy: Policy, prompts: list[list[int]], length: int, **options: Any) -> Generation:
    """A text whose next token depends on the last one alone; greedily it runs into a circle."""
    return policy.sample(
        ToyLanguage(40, seed=3, depth=1),
        make_prompt(prompts),
        length,
        params=SamplingParams(**{"temperature": 0.0, **options}),
        noise=Noise.from_seed(5, len(prompts)),
    )


def test_a_text_that_repeats_itself_takes_few_passes() -> None:
    prompts, length = [[1, 2], [7]], 120
    plain = generate(Autoregressive(), prompts, length)
    circle = len(set(plain.tokens.flatten().tolist()))
    made = generate(Jacobi(16, "hierarchy"), prompts, length)
    assert_same(made, plain)
    # two tokens more than once around the circle, then every window is right
    assert made.stats.drafts == "hierarchy"
    assert made.stats.passes <= circle + 2 + -(-length // 16)
    assert 2 * made.stats.passes < generate(Jacobi(16, "left"), prompts, length).stats.passes


def test_the_prompt_saves_passes_where_the_own_text_is_new() -> None:
    text = generate(Autoregressive(), [[1, 2]], 11).tokens[0].tolist()  # no pair recurs in it
    alone, quoting = (
        generate(Jacobi(4, "hierarchy"), [prompt], 11) for prompt in ([1, 2], [1, 2, *text, 1, 2])
    )
    assert alone.tokens[0].tolist() == quoting.tokens[0].tolist() == text
    assert quoting.stats.passes < alone.stats.passes


def test_a_row_that_says_the_same_earlier_saves_passes() -> None:
    """The second text is the first one's from its fifth token on; no pair recurs in either."""
    policy = Jacobi(4, "hierarchy")
    alone = generate(policy, [[3]], 12)
    together = generate(policy, [[3], [10]], 12)
    assert together.tokens[0].tolist() == alone.tokens[0].tolist()
    assert together.tokens[1, :8].tolist() == alone.tokens[0, 4:].tolist()
    assert int(together.passes[0]) < int(alone.passes[0])
