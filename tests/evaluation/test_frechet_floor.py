"""The floor of a Fréchet distance is that of the numbers of items at hand, not of others."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from mmaccel.evaluation.quality.frechet import frechet_floor

ITEMS = [0.0, 1.0, 1.5, 4.0, 4.5, 7.0, 11.0, 12.0]


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
