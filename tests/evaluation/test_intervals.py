"""Intervals of shares: Wilson's against scipy's, and what is known by hand at 0 and at 1."""

from __future__ import annotations

import pytest

from mmaccel.evaluation.quality.report import sum_verdicts, wilson

Z2 = 1.959963984540054**2  # the square of the normal distribution's 97.5 % point


@pytest.mark.parametrize("n", [1, 2, 7, 40, 1000])
def test_against_scipy(n: int) -> None:
    from scipy.stats import binomtest

    for k in sorted({0, 1, n // 3, n // 2, n - 1, n}):
        wanted = binomtest(k, n).proportion_ci(0.95, method="wilson")
        assert wilson(k / n, n) == pytest.approx((wanted.low, wanted.high), abs=1e-6)


@pytest.mark.parametrize("n", [1, 3, 7, 20, 10_000])  # rounding passes 0 at 7, and 1 at 20
def test_none_and_all_of_n_by_hand(n: int) -> None:
    """The bounds solve (p - k / n)^2 = z^2 p (1 - p) / n: p = z^2 / (n + z^2) next to 0."""
    low, high = wilson(0.0, n)
    assert 0 <= low < 1e-12 and high == pytest.approx(Z2 / (n + Z2), rel=1e-6)
    low, high = wilson(1.0, n)
    assert 1 - 1e-12 < high <= 1 and low == pytest.approx(n / (n + Z2), rel=1e-6)


def test_half_of_n_by_hand() -> None:
    """The same equation at 1 / 2: 1 / 2 plus or minus z / (2 sqrt(n + z^2))."""
    half = (Z2 / (100 + Z2)) ** 0.5 / 2
    assert wilson(0.5, 100) == pytest.approx((0.5 - half, 0.5 + half), rel=1e-6)


def test_verdicts_that_are_all_right_or_all_wrong_keep_an_interval() -> None:
    verdicts = [{"shapes": True, "colours": False, "whole": k < 2} for k in range(4)]
    found = sum_verdicts([*verdicts, None])
    assert found is not None and found["n"] == 4
    assert found["shares"] == {"shapes": 1.0, "colours": 0.0, "whole": 0.5}
    near_0 = pytest.approx((0, Z2 / (4 + Z2)), rel=1e-6, abs=1e-12)
    assert found["intervals"]["colours"] == near_0
    assert tuple(1 - bound for bound in found["intervals"]["shapes"][::-1]) == near_0
    assert sum_verdicts([None, None]) is None
