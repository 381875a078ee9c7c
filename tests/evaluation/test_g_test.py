"""G-test, total variation, floor and power against hand-made numbers and simulation."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from scipy import stats

from mmaccel.evaluation.exactness.g_test import (
    combine,
    count_sequences,
    first_divergence,
    g_test,
    pool_cells,
    power,
    sampling_floor,
    total_variation,
)


def draw_counts(model: torch.Tensor, n: int, runs: int) -> torch.Tensor:
    """`[runs, K]` counts of n draws each."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.multinomial(model.expand(runs, -1), n, replacement=True, generator=generator)
    return torch.nn.functional.one_hot(tokens, model.shape[0]).sum(1)


def test_statistic_by_hand_and_combined() -> None:
    model = torch.tensor([0.25, 0.5, 0.25])
    test = g_test(torch.tensor([30, 50, 20]), model)
    wanted = 2 * (30 * math.log(30 / 25) + 20 * math.log(20 / 25))
    assert test.statistic == pytest.approx(wanted)
    assert (test.degrees, test.n_samples) == (2, 100)
    correction = 1 + (4 + 2 + 4 - 1) / (6 * 100 * 2)
    assert test.correction == pytest.approx(correction)
    # two degrees: an exponential
    assert test.p_value == pytest.approx(math.exp(-wanted / correction / 2))
    assert test.total_variation == pytest.approx(0.05)
    whole = combine([test, test])
    assert (whole.degrees, whole.n_samples) == (4, 200)
    assert whole.p_value == pytest.approx(stats.chi2.sf(2 * wanted / correction, 4))


def test_small_cells_are_pooled_by_the_distribution_alone() -> None:
    expected = torch.tensor([100.0, 1.0, 3.0, 2.0, 7.0, 50.0])
    # From the least likely on: 1 + 2 + 3 = 6, then 7, 50, 100.
    assert pool_cells(expected).tolist() == [3, 0, 0, 0, 1, 2]
    assert pool_cells(torch.tensor([1.0, 1.0])).tolist() == [0, 0]
    model = torch.tensor([0.88, 0.06, 0.03, 0.03])
    test = g_test(torch.tensor([90, 4, 1, 5]), model)  # expected 88, 6 and 3 + 3
    wanted = 2 * (90 * math.log(90 / 88) + 4 * math.log(4 / 6))
    assert test.degrees == 2 and test.statistic == pytest.approx(wanted, rel=1e-5)


def test_a_token_of_probability_0_is_rejected_and_certainty_accepted() -> None:
    test = g_test(torch.tensor([999_999, 1]), torch.tensor([1.0, 0.0]))
    assert test.p_value == 0.0 and math.isinf(test.statistic)
    assert combine([test, g_test(torch.tensor([5, 5]), torch.tensor([0.5, 0.5]))]).p_value == 0.0
    assert g_test(torch.tensor([10, 0]), torch.tensor([1.0, 0.0])).p_value == 1.0


def test_a_right_sampler_is_rejected_as_often_as_the_level_says() -> None:
    """Many cells that expect little more than what a pool has to: where G alone rejects too much.

    40 000 tests at 1 %: the share has a standard deviation of 0.05 %; uncorrected it is 1.5 %.
    """
    model, n, runs = torch.full((60,), 1 / 60, dtype=torch.float64), 360, 40_000
    generator = numpy.random.default_rng(3)
    counts = torch.from_numpy(generator.multinomial(n, model.numpy(), size=runs)).double()
    statistics = 2 * torch.xlogy(counts, counts * 60 / n).sum(1)
    one = g_test(counts[0].long(), model)
    assert one.degrees == 59 and one.statistic == pytest.approx(float(statistics[0]))
    critical = stats.chi2.isf(0.01, 59) * one.correction
    share = float((statistics > critical).double().mean())
    assert share == pytest.approx(0.01, abs=0.0025)


@pytest.mark.slow
def test_power_against_simulation() -> None:
    """The worst distribution at its total variation: every cell off by the same share."""
    model = torch.full((10,), 0.1)
    wrong = model * (1 + 2 * 0.06 * torch.tensor([1.0, -1.0] * 5))
    assert total_variation(model, wrong) == pytest.approx(0.06)
    rejected = sum(g_test(c, model).p_value < 0.01 for c in draw_counts(wrong, 1500, 500)) / 500
    predicted = power(0.06, 1500, 9, 0.01)
    assert 0.3 < predicted < 0.95 and rejected == pytest.approx(predicted, abs=0.06)
    assert power(0.0, 1000, 9, 0.01) == pytest.approx(0.01, rel=1e-6)


@pytest.mark.parametrize("n", [1, 300])
def test_floor_against_simulation(n: int) -> None:
    model = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    distances = (draw_counts(model, n, 4000) / n - model).abs().sum(-1) / 2
    error = 4 * float(distances.std()) / 4000**0.5
    assert sampling_floor(model, n) == pytest.approx(float(distances.mean()), abs=error + 1e-6)


def test_counting_sequences_and_where_they_part() -> None:
    tokens = torch.tensor([[0, 1, 2], [0, 1, 2], [2, 2, 2], [1, 0, 0]])
    counts = count_sequences(tokens, 3)
    assert counts.shape == (27,) and int(counts.sum()) == 4
    assert [int(counts[i]) for i in (0 * 9 + 1 * 3 + 2, 26, 9)] == [2, 1, 1]
    assert first_divergence(tokens, tokens[:1].expand(4, -1)).tolist() == [3, 3, 0, 0]
