"""Intervals of shares: Wilson's against scipy's, and by hand at 0 and at 1."""

from __future__ import annotations

import pytest

from mmaccel.evaluation.quality.report import sum_verdicts, wilson

Z2 = 1.959963984540054**2  # the square of the normal distribution's 97.5 % point


@pytest.mark.parametrize("n", [1, 2, 3, 7, 20, 1000, 10_000])  # rounding passes 0 at 7, 1 at 20
def test_against_scipy(n: int) -> None:
    from scipy.stats import binomtest

    for k in sorted({0, 1, n // 3, n // 2, n - 1, n}):
        wanted = binomtest(k, n).proportion_ci(0.95, method="wilson")
        found = wilson(k / n, n)
        assert found == pytest.approx((wanted.low, wanted.high), abs=1e-6)
        assert 0 <= found[0] < found[1] <= 1


def test_verdicts_that_are_all_right_or_all_wrong_keep_an_interval() -> None:
    verdicts = [{"shapes": True, "colours": False, "whole": k < 2} for k in range(4)]
    found = sum_verdicts([*verdicts, None])
    assert found is not None and found["n"] == 4
    assert found["shares"] == {"shapes": 1.0, "colours": 0.0, "whole": 0.5}
    near_0 = pytest.approx((0, Z2 / (4 + Z2)), rel=1e-6, abs=1e-12)
    assert found["intervals"]["colours"] == near_0
    assert tuple(1 - bound for bound in found["intervals"]["shapes"][::-1]) == near_0
    assert sum_verdicts([None, None]) is None
