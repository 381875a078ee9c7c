"""The permutation test: its p-value, groups, power and refusals."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from mmaccel.evaluation.exactness.mmd import measure_power, permutation_test


@pytest.mark.parametrize("permutations", [19, 99, 999])
def test_sets_that_nothing_mixes_have_the_least_p_value_and_never_0(permutations: int) -> None:
    """No drawn labelling of 2 * 30 items is as extreme: the observed one is all that counts."""
    items = np.random.default_rng(0).normal(size=(60, 2))
    found = permutation_test(items[:30], items[30:] + 50, permutations=permutations)
    assert found.p_value == found.least == 1 / (permutations + 1)
    assert found.permutations == permutations


def test_labellings_have_the_sizes_of_the_sets() -> None:
    """One of the 15 labellings of 2 of 6 items is as extreme, and is drawn in its turn."""
    items = np.array([[0.0], [0.0], [9.0], [9.0], [9.0], [9.0]])
    found = permutation_test(items[:2], items[2:], permutations=3000)
    assert found.p_value == pytest.approx(1 / 15, abs=4 * np.sqrt(1 / 15 * 14 / 15 / 3000))
    assert found.least == 1 / 15


def test_labellings_that_tie_count() -> None:
    assert permutation_test(np.ones((4, 2)), np.ones((5, 2)), permutations=19).p_value == 1.0


def test_all_labellings_of_six_items_by_brute_force() -> None:
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
    test = permutation_test(items[:3], items[3:], permutations=4000)
    assert test.statistic == pytest.approx(observed, rel=1e-9)
    assert test.p_value == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / 4000))
    assert 0.05 < share < 0.7  # or the comparison above would say little


def test_a_test_of_one_distribution_rejects_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    p_values = [
        permutation_test(rng.normal(size=(8, 2)), rng.normal(size=(8, 2)), permutations=39).p_value
        for _ in range(400)
    ]
    assert np.mean([p <= 0.05 for p in p_values]) == pytest.approx(0.05, abs=0.035)
    assert np.mean([p <= 0.5 for p in p_values]) == pytest.approx(0.5, abs=0.08)


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


def test_power_rises_with_the_shift_and_the_items() -> None:
    items = np.random.default_rng(7).normal(size=(100, 3)) * [3, 1, 1]
    options = {"shifts": (0.0, 0.5, 1.0, 2.0), "trials": 20, "level": 0.05, "permutations": 39}
    few, many = (measure_power(items, (n, n), **options) for n in (10, 60))
    assert few.chances[0.0] <= 0.25 and many.chances[0.0] <= 0.25
    assert many.visible is not None and few.visible is not None and many.visible < few.visible
    assert max(many.chances) == many.visible  # no shift is tested after the one that was seen
    assert measure_power(items, (3, 3), **(options | {"shifts": (0.0,)})).visible is None


def test_far_from_zero_distances_keep_their_digits() -> None:
    items = np.random.default_rng(0).normal(size=(40, 3)).round(3)
    near = permutation_test(items[:20], items[20:] + 1, permutations=99)
    far = permutation_test(items[:20] + 1e9, items[20:] + 1 + 1e9, permutations=99)
    assert far.statistic == pytest.approx(near.statistic, rel=1e-4)
