"""KID: pairs by hand, blocks, subsets, the lack of bias."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from mmaccel.evaluation.quality.kid import measure_kid, squared_mmd


def test_unequal_numbers_and_width_by_hand() -> None:
    # (x y / 2 + 1)^3; own pairs: 1; 1, 1, 8 of three; across: 1 x 3, then 8, 27, 8
    first, second = [[0.0, 0.0], [2.0, 0.0]], [[1.0, 0.0], [2.0, 0.0], [1.0, 0.0]]
    own = (2.0**3 + 1.5**3 + 2.0**3) / 3
    across = 2 * (3 * 1 + 2.0**3 + 3.0**3 + 2.0**3) / 6
    assert squared_mmd(first, second) == pytest.approx(1 + own - across, rel=1e-12)


def test_more_items_than_a_block_holds() -> None:
    """The sums of all pairs of 2500 items, from their powers: (x y + 1)^3 at width 1."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=2500), rng.normal(size=2100)

    def pairs(x: np.ndarray, y: np.ndarray) -> float:
        ways = (1, 3, 3, 1)
        return float(sum(w * (x**k).sum() * (y**k).sum() for k, w in enumerate(ways)))

    own = sum((pairs(x, x) - ((x * x + 1) ** 3).sum()) / (len(x) * (len(x) - 1)) for x in (a, b))
    wanted = own - 2 * pairs(a, b) / (len(a) * len(b))
    assert squared_mmd(a[:, None], b[:, None]) == pytest.approx(wanted, rel=1e-9)


def test_the_mean_over_all_samples_of_one_distribution_is_0() -> None:
    """Unbiased: every draw of two and two from three points, each with its probability."""
    points = [[0.0], [1.0], [3.0]]
    draws = list(product(points, repeat=2))
    values = [squared_mmd(list(a), list(b)) for a in draws for b in draws]
    assert np.mean(values) == pytest.approx(0, abs=1e-9) and np.std(values) > 1


def test_subsets() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(300, 3)), rng.normal(size=(200, 3)) + 0.5
    found = measure_kid(a, b, subsets=400, subset_size=40)
    assert (found.n_first, found.n_second, found.subset_size, found.subsets) == (300, 200, 40, 400)
    assert found.mean == pytest.approx(found.value, abs=4 * found.std / 20)
    assert found.value == pytest.approx(squared_mmd(a, b)) and found.bias.startswith("unbiased")
    whole = measure_kid(a[:40], b[:40], subset_size=1000, subsets=2)  # all subsets are the sets
    assert whole.subset_size == 40 and whole.mean == pytest.approx(whole.value, rel=1e-9)
    assert whole.std == pytest.approx(0, abs=1e-9 * abs(whole.value))
    none = measure_kid(a, b, subsets=0)
    assert none.mean == none.value and np.isnan(none.std)
    assert measure_kid(a, b, subset_size=40) == measure_kid(a, b, subset_size=40)


def test_mean_and_spread_of_the_subsets_that_a_seed_draws() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(30, 2)), rng.normal(size=(20, 2)) + 0.5
    drawn = np.random.default_rng(7)
    values = [
        squared_mmd(a[drawn.choice(30, 9, replace=False)], b[drawn.choice(20, 9, replace=False)])
        for _ in range(4)
    ]
    found = measure_kid(a, b, subsets=4, subset_size=9, seed=7)
    assert found.mean == pytest.approx(np.mean(values)) and found.std == pytest.approx(
        np.std(values)
    )
