"""Fréchet distance: known distances, batches, ranks, its floor, bad features."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from mmaccel.errors import NumericsError, ShapeError
from mmaccel.evaluation.quality.frechet import (
    Moments,
    frechet_distance,
    frechet_floor,
    frechet_of,
    measure_moments,
    merge_moments,
)

ITEMS = [0.0, 1.0, 1.5, 4.0, 4.5, 7.0, 11.0, 12.0]


def exactly(mean: list[float], covariance: list[list[float]], n: int = 5) -> Moments:
    """Moments of this mean and covariance."""
    return Moments(n, np.array(mean), np.array(covariance) * (n - 1))


def test_normal_distributions_along_the_axes_by_hand() -> None:
    # variances 1, 4, 9 and 4, 4, 1: (1 - 2)^2 + (2 - 2)^2 + (3 - 1)^2, means 3 and 4 apart
    first = exactly([0, 0, 0], np.diag([1.0, 4, 9]).tolist())
    second = exactly([3, 4, 0], np.diag([4.0, 4, 1]).tolist())
    assert frechet_distance(first, second).distance == pytest.approx(25 + 5, rel=1e-12)


def test_a_rotated_distribution_by_hand() -> None:
    """Variances 1 and 9, and the same rotated by 45 degrees: det of the product is 81, its trace is
    1 + 9 + ... = 50, so that the trace of its root is sqrt(50 + 2 * 9)."""
    straight = exactly([0, 0], [[1, 0], [0, 9]])
    turned = exactly([0, 0], [[5, 4], [4, 5]])
    found = frechet_distance(straight, turned).distance
    assert found == pytest.approx(10 + 10 - 2 * np.sqrt(50 + 2 * 9), rel=1e-12)
    assert found == pytest.approx(frechet_distance(turned, straight).distance, rel=1e-12)


def test_four_items_by_hand() -> None:
    first = [[0.0], [2.0]]  # mean 1, variance 2
    second = [[0.0], [0.0], [6.0]]  # mean 2, variance 12
    found = frechet_of(first, second)
    assert found.distance == pytest.approx(1 + 2 + 12 - 2 * np.sqrt(24), rel=1e-12)
    assert (found.n_first, found.n_second, found.width) == (2, 3, 1)
    assert found.bias.startswith("biased")


def test_against_a_root_of_the_product() -> None:
    from scipy.linalg import sqrtm

    rng = np.random.default_rng(0)
    mix = rng.normal(size=(6, 6))
    a, b = rng.normal(size=(90, 6)) @ mix, rng.normal(size=(70, 6)) + 0.3
    wanted = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(
        np.cov(a.T) + np.cov(b.T) - 2 * np.real(sqrtm(np.cov(a.T) @ np.cov(b.T)))
    )
    assert frechet_of(a, b).distance == pytest.approx(wanted, rel=1e-9)


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


def test_batches_give_what_all_together_give() -> None:
    features = np.random.default_rng(2).normal(size=(50, 4)) + 1e6  # a mean that swamps the spread
    parts = [measure_moments(features[k : k + 7]) for k in range(0, 50, 7)]
    total = parts[0]
    for part in parts[1:]:
        total = merge_moments(total, part)
    assert total.n == 50
    assert total.mean == pytest.approx(features.mean(0), rel=1e-14)
    assert total.covariance == pytest.approx(np.cov((features - 1e6).T), rel=1e-6)


@pytest.mark.parametrize(
    ("first", "error", "words"),
    [
        ([[1.0, 2.0]], ShapeError, "at least 2, received \\[1, 2\\]"),
        ([1.0, 2.0], ShapeError, "received \\[2\\]"),
        ([[1.0], [2.0]], ShapeError, "received 1 and 2; use one extractor"),
        ([[1.0, 2.0], [float("nan"), 0.0], [float("inf"), 0.0]], NumericsError, "in 2 of 3 rows"),
    ],
)
def test_bad_features(first: list, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        frechet_of(first, [[1.0, 2.0], [3.0, 4.0]])
    with pytest.raises(error):
        frechet_of([[1.0, 2.0], [3.0, 4.0]], first)


def test_bad_moments() -> None:
    good = exactly([0, 0], [[1, 0], [0, 1]])
    with pytest.raises(ShapeError, match="first: expected at least 2 items, received 1"):
        frechet_distance(measure_moments([[1.0, 2.0]]), good)
    with pytest.raises(NumericsError, match="second: expected finite moments"):
        frechet_distance(good, exactly([0, np.inf], [[1, 0], [0, 1]]))
    with pytest.raises(ShapeError, match="received 2 and 1"):
        merge_moments(good, exactly([0], [[1]]))


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
