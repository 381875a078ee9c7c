"""Token recycling: fewer passes where the text repeats itself, and what the table holds.

Tokens, batches whose rows come and go, captured passes and the distribution are proved for every
draft source in `tests/matrix`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mmaccel import Autoregressive, Jacobi, Noise, SamplingParams, Speculative
from mmaccel.contracts import Pass
from mmaccel.policies import Policy
from mmaccel.results import Generation
from mmaccel.samplers.drafting.token_recycling import RecyclingDrafter
from mmaccel.samplers.window.run import WindowRun
from tests.exactness.bitwise_runs import assert_same
from tests.fixtures.graph_recorder import Recorder
from tests.fixtures.toy_models import ToyLanguage, make_prompt

LENGTH = 120


def repeat(policy: Policy, **options: Any) -> Generation:
    """A text whose next token depends on the last one alone; greedily it runs into a circle."""
    return policy.sample(
        ToyLanguage(40, seed=3, depth=1), make_prompt([[1, 2], [7]]), LENGTH,
        params=SamplingParams(**{"temperature": 0.0, **options}), noise=Noise.from_seed(5, 2),
    )  # fmt: skip


def test_a_text_that_repeats_itself_takes_few_passes() -> None:
    plain = repeat(Autoregressive())
    circle = len(set(plain.tokens.flatten().tolist()))
    made = repeat(Jacobi(16, "token-recycling"))
    assert_same(made, plain)
    # once around the circle every window is right
    assert made.stats.drafts == "token-recycling"
    assert made.stats.passes <= circle + -(-LENGTH // 16) + 2
    assert 2 * made.stats.passes < repeat(Jacobi(16, "left")).stats.passes


def test_one_occurrence_is_enough() -> None:
    """At a low temperature tokens are mostly the likeliest ones; n-grams wait for a repetition."""
    cold = {"temperature": 0.3}
    made = repeat(Jacobi(8, "token-recycling"), **cold)
    assert_same(made, repeat(Autoregressive(), **cold))
    assert made.stats.passes < repeat(Jacobi(8, "left"), **cold).stats.passes


def test_of_two_occurrences_in_a_window_the_last_one_counts() -> None:
    class Counts(Recorder):
        """Of the slot after position p, token p is the likeliest."""

        def forward(self, entries: Pass) -> torch.Tensor:
            assert entries.start is not None
            positions = entries.start[:, None] + torch.arange(entries.tokens.shape[1])
            return torch.nn.functional.one_hot(positions, self.vocab_size).float()

    run = WindowRun(
        Jacobi(4, "token-recycling"), Counts([0.0] * 6), make_prompt([[1]]), 8,
        params=SamplingParams(), noise=Noise.from_seed(0, 1),
    )  # fmt: skip
    run.write_drafts(torch.tensor([[1, 2, 1]]))
    run.forward()
    run.observe(None)
    assert isinstance(run.drafter, RecyclingDrafter)
    # the pass read 1, 1, 2, 1; a token that it has not read follows itself
    assert run.drafter.successors.get()[0, :6, 0].tolist() == [0, 3, 2, 3, 4, 5]


def test_tokens_outside_of_the_vocabulary() -> None:
    """A prompt of a model whose image codes are the first ids may end with a text token."""

    class Codes(ToyLanguage):
        def forward(self, entries: Pass) -> torch.Tensor:
            known = entries.tokens.clamp(max=self.vocab_size - 1)
            return super().forward(replace(entries, tokens=known))

    made = [
        policy.sample(
            Codes(5, depth=2), make_prompt([[9, 7], [3]]), 20, params=SamplingParams(),
            noise=Noise.from_seed(1, 2),
        )
        for policy in (Autoregressive(), Jacobi(6, "token-recycling"))
    ]  # fmt: skip
    assert_same(made[1], made[0])


def test_speculative_keeps_its_two_sources() -> None:
    assert Speculative().draft_source().name == "ngram"
