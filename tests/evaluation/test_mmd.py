"""The permutation test: its p-value by brute force, groups, and power."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from mmaccel.evaluation.exactness.mmd import measure_power, permutation_test


def test_p_values_of_known_sets() -> None:
    items = np.random.default_rng(0).normal(size=(60, 2))
    apart = permutation_test(items[:30], items[30:] + 50, permutations=99)
    assert apart.p_value == apart.least == 1 / 100  # the observed labelling is all that counts
    assert permutation_test(np.ones((4, 2)), np.ones((5, 2)), permutations=19).p_value == 1.0
    items = np.array([[0.0], [0.0], [9.0], [9.0], [9.0], [9.0]])
    found = permutation_test(items[:2], items[2:], permutations=3000)
    assert found.least == 1 / 15 and found.p_value == pytest.approx(1 / 15, abs=0.02)


@pytest.mark.parametrize("shift", [0, 1e6])
def test_all_labellings_of_six_items_by_brute_force(shift: float) -> None:
    rng = np.random.default_rng(4)
    items = rng.normal(size=(6, 2))
    items[3:, 0] += 1.2
    scale = np.median([sum((items[i] - items[j]) ** 2) for i, j in combinations(range(6), 2)])

    def k(i: int, j: int) -> float:
        return float(np.exp(-sum((items[i] - items[j]) ** 2) / (2 * scale)))

    def statistic(one: tuple[int, ...]) -> float:
        other = [i for i in range(6) if i not in one]
        own = sum(2 * k(i, j) for s in (one, other) for i, j in combinations(s, 2)) / 6
        return own - 2 * sum(k(i, j) for i in one for j in other) / 9

    every = [statistic(one) for one in combinations(range(6), 3)]
    observed = statistic((0, 1, 2))
    share = np.mean([value >= observed - 1e-12 for value in every])
    test = permutation_test(items[:3] + shift, items[3:] + shift, permutations=4000)
    assert test.statistic == pytest.approx(observed, rel=1e-6)
    assert test.p_value == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / 4000))
    assert 0.05 < share < 0.7  # or the comparison above would say little


def test_labels_are_permuted_within_groups() -> None:
    """Two prompts of unlike images, counted differently on the two sides: one distribution a
    prompt, but not one distribution of all items."""
    rng = np.random.default_rng(6)
    near, far = rng.normal(size=(40, 2)), rng.normal(size=(40, 2)) + 20
    first, second = np.concatenate([near[:30], far[:10]]), np.concatenate([near[30:], far[10:]])
    groups = ([0] * 30 + [1] * 10, [0] * 10 + [1] * 30)
    assert permutation_test(first, second).p_value < 0.01
    assert permutation_test(first, second, groups=groups).p_value > 0.05
    moved = second + 1.5  # and what differs within a prompt is seen
    assert permutation_test(first, moved, groups=groups).p_value < 0.01


def test_power_rises_with_the_items() -> None:
    items = np.random.default_rng(7).normal(size=(100, 3)) * [3, 1, 1]
    options = {"shifts": (0.0, 0.5, 1.0, 2.0), "trials": 20, "level": 0.05, "permutations": 39}
    few, many = (measure_power(items, (n, n), **options) for n in (10, 60))
    assert few.chances[0.0] <= 0.25 and many.chances[0.0] <= 0.25
    assert many.visible is not None and few.visible is not None and many.visible < few.visible
    assert max(many.chances) == many.visible  # no shift is tested after the one that was seen
