"""Whole runs of every policy: counts add up, bad scores are refused, odd ends do no harm."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mmaccel import (
    Autoregressive,
    GroupedSpeculative,
    Jacobi,
    Noise,
    NumericsError,
    OptionError,
    SamplingParams,
    Speculative,
    SpeculativeJacobi,
)
from mmaccel.contracts import Policy
from mmaccel.results import Progress
from tests.fixtures.graph_recorder import Recorder
from tests.fixtures.toy_models import ToyLanguage, make_prompt

POLICIES: list[Policy] = [
    Autoregressive(),
    Jacobi(4),
    SpeculativeJacobi(4),
    SpeculativeJacobi(4, "gumbel", "left"),
    Speculative(4),
    GroupedSpeculative(4, group=1),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_counts_add_up(policy: Policy) -> None:
    rows = [[1, 2, 0], [0], [2, 2], [1], [0, 0, 1]]
    model = ToyLanguage(3, depth=7)
    made = policy.sample(
        model,
        make_prompt(rows, stop_tokens=torch.tensor([2])),
        30,
        params=SamplingParams(),
        noise=Noise.from_seed(4, 5),
    )
    stats = made.stats
    assert stats.tokens == int(made.lengths.sum())
    assert stats.tokens == sum((k + 1) * n for k, n in enumerate(stats.accepted))
    assert stats.row_passes == sum(stats.accepted) == int(made.passes.sum())
    assert int(made.passes.max()) == stats.passes and bool((made.passes <= made.lengths).all())
    assert stats.passes == model.passes - 1 and stats.prefill_passes == 1
    assert stats.passes <= stats.row_passes <= 5 * stats.passes
    assert stats.exactness == type(policy).exactness
    assert len(set(made.lengths.tolist())) > 1
    for row, n in zip(made.tokens.tolist(), made.lengths.tolist()):
        assert 2 not in row[: n - 1] and (row[n - 1] == 2 or n == 30)
        assert row[n:] == [0] * (30 - n)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf], ids=str)
def test_scores_that_are_invalid_logits(policy: Policy, temperature: float, bad: float) -> None:
    model = Recorder([bad] * 4 if bad < 0 else [0.0, bad, 0.0, 0.0])
    with pytest.raises(NumericsError, match="scores: expected .*, received NaN.*; "):
        policy.sample(
            model,
            make_prompt([[4]]),
            5,
            params=SamplingParams(temperature=temperature),
            noise=Noise.from_seed(0, 1),
        )


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_nan_after_a_rejected_draft_does_no_harm(policy: Policy) -> None:
    """The toy returns NaN after the end, where nothing is accepted; see `ToyLanguage.forward`."""
    model = ToyLanguage(3, depth=7)
    rows = [[1]] * 40
    noise = Noise.from_seed(0, 40)
    made = policy.sample(model, make_prompt(rows), 5, params=SamplingParams(), noise=noise)
    assert made.lengths.tolist() == [5] * 40
    assert math.isfinite(made.stats.total_variation)


@pytest.mark.parametrize("drafter", [None, ToyLanguage(3, seed=5)], ids=["lookup", "drafter"])
def test_a_row_ended_before_its_first_token(drafter: ToyLanguage | None) -> None:
    """A limit of 0 empties a row; the others are not disturbed."""

    def on_step(progress: Progress) -> Tensor:
        return torch.tensor([0, 99, 99])

    made = Speculative(3, drafter).sample(
        ToyLanguage(3),
        make_prompt([[1], [2], [0]]),
        9,
        params=SamplingParams(),
        noise=Noise.from_seed(0, 3),
        on_step=on_step,
    )
    assert made.lengths.tolist() == [0, 9, 9]
    assert made.tokens[0].tolist() == [0] * 9
    assert made.stats.tokens == 18


def test_draft_models_have_to_suit() -> None:
    with pytest.raises(OptionError, match="draft_model: expected .*, received str; "):
        Speculative(3, "gpt2")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="vocabulary of 3, received 4; "):
        Speculative(3, ToyLanguage(4)).sample(
            ToyLanguage(3),
            make_prompt([[1]]),
            4,
            params=SamplingParams(),
            noise=Noise.from_seed(0, 1),
        )


def test_passes_of_a_draft_model_are_counted() -> None:
    target, drafter = ToyLanguage(3), ToyLanguage(3)
    made = Speculative(4, drafter).sample(
        target, make_prompt([[1, 2]]), 8, params=SamplingParams(), noise=Noise.from_seed(0, 1)
    )
    # The same model drafts: all drafts are kept, 4 tokens a pass; 3 drafts each and the prompt.
    assert made.stats.accepted == [0, 0, 0, 2]
    assert made.stats.draft_passes == drafter.passes == 7
    assert drafter.widths == [1, 1, 1, 1, 2, 1, 1]
    assert target.widths == [1, 4, 4]
