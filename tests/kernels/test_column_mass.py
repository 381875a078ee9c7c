"""The specification of column mass against whole attention maps."""

from __future__ import annotations

import math

import pytest
import torch

from mmaccel import ShapeError
from mmaccel.kernels.column_mass import column_mass
from mmaccel.kernels.window_attention import window_attention

STARTS = [0, 9, 25]


@pytest.mark.parametrize("is_weighted", [False, True])
def test_equals_the_columns_of_a_softmax(is_weighted: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 5, 8, generator=generator)
    k = torch.randn(3, 30, 2, 8, generator=generator).transpose(1, 2)
    weights = torch.rand(3, 5, generator=generator) if is_weighted else None
    start = torch.tensor(STARTS)
    lse = window_attention(q, k, k, start, scale=0.5, lse=True)[1]
    expected = torch.zeros(3, 2, 30, dtype=torch.float64)
    for row, first in enumerate(STARTS):
        for head in range(4):
            for w in range(5):
                keys = k[row, head // 2, : first + w + 1].double()
                attention = (keys @ q[row, head, w].double() * 0.5).softmax(0)
                weight = 1.0 if weights is None else float(weights[row, w])
                expected[row, head // 2, : first + w + 1] += weight * attention
    mass = column_mass(q, k, lse, start, scale=0.5, weights=weights)
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass.double(), expected, atol=3e-6, rtol=3e-6)


def test_a_planted_key_gets_all() -> None:
    """Query w looks at position w alone: the mass is the number of heads of the group."""
    q = 40.0 * torch.eye(4).expand(1, 6, 4, 4)
    k = 40.0 * torch.eye(4).expand(1, 2, 4, 4)
    start = torch.zeros(1, dtype=torch.int64)
    lse = window_attention(q, k, k, start, scale=1.0, lse=True)[1]
    assert torch.equal(column_mass(q, k, lse, start, scale=1.0), torch.full((1, 2, 4), 3.0))


def test_what_is_not_seen_gets_nothing() -> None:
    q, k = torch.ones(1, 1, 3, 4), torch.ones(1, 1, 10, 4)
    k[:, :, 2:] = math.nan
    start = torch.tensor([-1])
    lse = window_attention(q, k, k, start, scale=1.0, lse=True)[1]
    expected = torch.tensor([[[1.5, 0.5] + [0.0] * 8]])
    torch.testing.assert_close(column_mass(q, k, lse, start, scale=1.0), expected)


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, start = torch.ones(2, 2, 3, 4), torch.ones(2, 1, 5, 4), torch.zeros(2).long()
    lse = torch.zeros(2, 2, 3)
    with pytest.raises(ShapeError, match="log-sum-exps"):
        column_mass(q, k, lse[:, :1], start, scale=1.0)
    with pytest.raises(ShapeError, match="weights"):
        column_mass(q, k, lse, start, scale=1.0, weights=torch.ones(3))
    with pytest.raises(ShapeError, match="start"):
        column_mass(q, k, lse, start[:1], scale=1.0)
