"""Fréchet distance: by hand, by other formulas, its floor."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from mmaccel.evaluation.quality.frechet import frechet_floor, frechet_of

ITEMS = [0.0, 1.0, 1.5, 4.0, 4.5, 7.0, 11.0, 12.0]


def test_five_items_by_hand() -> None:
    first = [[0.0], [2.0]]  # mean 1, variance 2
    second = [[0.0], [0.0], [6.0]]  # mean 2, variance 12
    found = frechet_of(first, second)
    assert found.distance == pytest.approx(1 + 2 + 12 - 2 * np.sqrt(24), rel=1e-12)
    assert (found.n_first, found.n_second, found.width) == (2, 3, 1)
    assert found.bias.startswith("biased")


@pytest.mark.parametrize("shift", [0.0, 1e6])
def test_against_a_root_of_the_product(shift: float) -> None:
    from scipy.linalg import sqrtm

    rng = np.random.default_rng(0)
    mix = rng.normal(size=(6, 6))
    a, b = rng.normal(size=(90, 6)) @ mix, rng.normal(size=(70, 6)) + 0.3
    wanted = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(
        np.cov(a.T) + np.cov(b.T) - 2 * np.real(sqrtm(np.cov(a.T) @ np.cov(b.T)))
    )
    assert frechet_of(a + shift, b + shift).distance == pytest.approx(wanted, rel=1e-9)


def test_fewer_items_than_features() -> None:
    """The trace of the root again, from the items themselves: no covariance, no root."""
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(8, 40)), 3 * rng.normal(size=(12, 40)) + 1
    one, other = (x - x.mean(0) for x in (a, b))
    shared = np.linalg.svd(one @ other.T, compute_uv=False).sum() / np.sqrt(7 * 11)
    traces = (one**2).sum() / 7 + (other**2).sum() / 11
    wanted = ((a.mean(0) - b.mean(0)) ** 2).sum() + traces - 2 * shared
    assert frechet_of(a, b).distance == pytest.approx(wanted, rel=1e-12)
    assert frechet_of(a, a).distance == pytest.approx(0, abs=1e-10)


def distance(one: list[float], other: list[float]) -> float:
    """Of two sets of numbers: means and deviations, each less the other, squared and added."""
    apart = np.mean(one) - np.mean(other)
    return float(apart**2 + (np.std(one, ddof=1) - np.std(other, ddof=1)) ** 2)


def mean_over_splits(n: int) -> tuple[float, float]:
    """Mean and standard deviation of all splits into n and the rest."""
    found = []
    for chosen in combinations(range(len(ITEMS)), n):
        rest = [x for k, x in enumerate(ITEMS) if k not in chosen]
        found.append(distance([ITEMS[k] for k in chosen], rest))
    return float(np.mean(found)), float(np.std(found))


@pytest.mark.parametrize("n", [2, 6])
def test_all_splits_of_the_given_sizes_by_brute_force(n: int) -> None:
    wanted, spread = mean_over_splits(n)
    halves, _ = mean_over_splits(len(ITEMS) // 2)
    close = 5 * spread / 4000**0.5
    items = np.array(ITEMS)[:, None]
    found = frechet_floor(items[:n], items[n:], splits=4000)
    assert found == pytest.approx(wanted, abs=close)
    assert abs(wanted - halves) > 2 * close  # or the comparison above would say little


def test_the_seed_chooses_the_splits() -> None:
    rng = np.random.default_rng(0)
    one, other = rng.normal(size=(9, 2)), rng.normal(size=(30, 2))
    assert frechet_floor(one, other, seed=4) == frechet_floor(one, other, seed=4)
    assert frechet_floor(one, other, seed=4) != frechet_floor(one, other, seed=5)
