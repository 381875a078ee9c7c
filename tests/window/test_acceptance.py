"""Acceptance, residuals and draws against hand-made numbers."""

from __future__ import annotations

import pytest
import torch

from mmaccel.samplers.acceptance import (
    at_tokens,
    count_leading,
    draw,
    exact_acceptance,
    is_kept,
    one_hot,
    residual,
)


def probabilities(*values: float) -> torch.Tensor:
    return torch.tensor([[values]])


def test_count_leading() -> None:
    rows = [[True, True, False, True], [False, True, True, True], [True] * 4]
    assert count_leading(torch.tensor(rows)).tolist() == [2, 0, 4]
    assert count_leading(torch.zeros(3, 0, dtype=torch.bool)).tolist() == [0, 0, 0]


def test_at_tokens_and_one_hot() -> None:
    distributions = torch.arange(12.0).reshape(2, 2, 3)
    tokens = torch.tensor([[0, 2], [1, 1]])
    assert at_tokens(distributions, tokens).tolist() == [[0, 5], [7, 10]]
    assert one_hot(tokens, 3).tolist() == [[[1, 0, 0], [0, 0, 1]], [[0, 1, 0], [0, 1, 0]]]


@pytest.mark.parametrize(
    "p, q, coin, kept",
    [
        (0.2, 0.4, 0.49, True),  # kept below p / q = 0.5
        (0.2, 0.4, 0.51, False),
        (0.4, 0.2, 1 - 2**-24, True),  # always kept where p >= q
        (0.0, 0.4, 2**-33, False),  # never where p is 0
        (0.3, 1.0, 0.29, True),  # a token given outright is kept with probability p
        (0.3, 1.0, 0.31, False),
    ],
)
def test_is_kept(p: float, q: float, coin: float, kept: bool) -> None:
    drafts = torch.tensor([[1]])
    made = is_kept(probabilities(1 - p, p), probabilities(1 - q, q), drafts, torch.tensor([[coin]]))
    assert made.tolist() == [[kept]]


def test_exact_acceptance() -> None:
    made = exact_acceptance(
        probabilities(0.2, 0.5, 0.3, 0.0, 0.0), probabilities(0.4, 0.4, 0.0, 0.2, 0.0)
    )
    torch.testing.assert_close(made, probabilities(0.5, 1.0, 1.0, 0.0, 1.0))


def test_residual_is_the_positive_part() -> None:
    made = residual(probabilities(0.2, 0.5, 0.3), probabilities(0.4, 0.4, 0.2))
    torch.testing.assert_close(made, probabilities(0.0, 0.1, 0.1))


def test_residual_of_equal_distributions_is_the_distribution() -> None:
    same = probabilities(0.2, 0.5, 0.3)
    assert residual(same, same.clone()).equal(same)
    above = probabilities(0.2, 0.5, 0.30001)  # p <= q everywhere: only rounding makes such a pair
    assert residual(same, above).equal(same)


def test_a_rejection_and_its_redraw_restore_the_target() -> None:
    """min(p, q) + (1 - A) (p - q)+ / d, written out, is p."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(2, 30, 1, 6, generator=generator, dtype=torch.float64).unbind(0)
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    kept = q * exact_acceptance(p, q)
    rest = residual(p, q)
    output = kept + (1 - kept.sum(-1, keepdim=True)) * rest / rest.sum(-1, keepdim=True)
    torch.testing.assert_close(output, p)


def test_draw_inverts_the_cumulative_distribution() -> None:
    weights = probabilities(1.0, 0.0, 3.0, 4.0)  # sums 1, 1, 4, 8 of 8
    for uniform, token in [(0.01, 0), (0.124, 0), (0.125, 2), (0.49, 2), (0.51, 3), (0.999, 3)]:
        assert draw(weights, torch.tensor([[uniform]])).tolist() == [[token]]


@pytest.mark.parametrize("uniform", [2**-33, 0.25, 0.5, 0.75, 1 - 2**-24])
def test_draw_never_takes_weight_0(uniform: float) -> None:
    """At both ends and exactly on a step, in small and large vocabularies."""
    u = torch.tensor([[uniform]])
    assert int(draw(probabilities(0.0, 1.0, 0.0), u)) == 1
    assert int(draw(probabilities(0.0, 0.0, 1.0, 1.0, 0.0, 2.0, 0.0), u)) in (2, 3, 5)
    assert int(draw(probabilities(0.0, 1e-38, 0.0), u)) == 1
    weights = torch.zeros(1, 1, 4000)
    weights[..., 7:3990:3] = torch.rand(1328, generator=torch.Generator().manual_seed(0)) + 1e-8
    assert float(weights[0, 0, int(draw(weights, u))]) > 0


def test_one_distribution_for_all_slots() -> None:
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(4, 1, 9, generator=generator)
    uniform = torch.rand(4, 50, generator=generator)
    assert draw(weights, uniform).equal(draw(weights.expand(-1, 50, -1), uniform))
    assert draw(weights, uniform[:, :0]).shape == (4, 0)


def test_draw_follows_its_weights() -> None:
    weights = torch.tensor([0.1, 0.0, 0.6, 0.3])
    uniforms = (torch.arange(10_000) + 0.5)[None] / 10_000
    tokens = draw(weights.expand(1, 10_000, 4), uniforms)[0]
    counts = torch.bincount(tokens, minlength=4)
    assert (counts - torch.tensor([1000, 0, 6000, 3000])).abs().max() <= 1
