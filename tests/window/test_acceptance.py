"""Acceptance, residuals and draws against hand-made numbers."""

from __future__ import annotations

import pytest
import torch

from mmaccel.samplers.acceptance import (
    draw,
    is_kept,
    residual,
)


def probabilities(*values: float) -> torch.Tensor:
    return torch.tensor([[values]])


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


def test_residual_of_equal_distributions_is_the_distribution() -> None:
    same = probabilities(0.2, 0.5, 0.3)
    assert residual(same, same.clone()).equal(same)
    above = probabilities(0.2, 0.5, 0.30001)  # p <= q everywhere: only rounding makes such a pair
    assert residual(same, above).equal(same)


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
