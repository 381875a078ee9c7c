"""KID: pairs by hand, blocks, subsets, the lack of bias; the permutation test and its power."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from mmaccel.errors import NumericsError, OptionError, ShapeError
from mmaccel.evaluation.exactness.mmd import gaussian_kernel, measure_power, permutation_test
from mmaccel.evaluation.quality import kid
from mmaccel.evaluation.quality.kid import measure_kid, squared_mmd


def test_two_points_by_hand() -> None:
    # kernel (x y + 1)^3 at width 1: own pairs (0, 2): 1 and (1, 3): 64; across 1, 1, 27, 343
    found = squared_mmd([[0.0], [2.0]], [[1.0], [3.0]])
    assert found == pytest.approx(1 + 64 - 2 * (1 + 1 + 27 + 343) / 4, rel=1e-12)


def test_unequal_numbers_and_width_by_hand() -> None:
    # (x y / 2 + 1)^3; own pairs: 1; 1, 1, 8 of three; across: 1 x 3, then 8, 27, 8
    first, second = [[0.0, 0.0], [2.0, 0.0]], [[1.0, 0.0], [2.0, 0.0], [1.0, 0.0]]
    own = (2.0**3 + 1.5**3 + 2.0**3) / 3
    across = 2 * (3 * 1 + 2.0**3 + 3.0**3 + 2.0**3) / 6
    assert squared_mmd(first, second) == pytest.approx(1 + own - across, rel=1e-12)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(23, 5)), rng.normal(size=(17, 5))
    whole = squared_mmd(a, b)
    monkeypatch.setattr(kid, "_BLOCK", 4)
    assert squared_mmd(a, b) == pytest.approx(whole, rel=1e-12)


def test_the_mean_over_all_samples_of_one_law_is_0() -> None:
    """Unbiased: every draw of two and two from a law of three points, each with its chance."""
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
    assert measure_kid(a, b, subset_size=1000, subsets=2).subset_size == 200
    none = measure_kid(a, b, subsets=0)
    assert none.mean == none.value and np.isnan(none.std)
    assert measure_kid(a, b, subset_size=40) == measure_kid(a, b, subset_size=40)
    with pytest.raises(OptionError, match="received 3 of 1"):
        measure_kid(a, b, subsets=3, subset_size=1)
    with pytest.raises(ShapeError, match="received 3 and 1"):
        measure_kid(a, b[:, :1])


def test_mean_and_spread_of_subsets_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([1.0, 3.0, 5.0])
    monkeypatch.setattr(kid, "squared_mmd", lambda a, b: next(values))
    found = measure_kid([[0.0]] * 3, [[1.0]] * 3, subsets=2)
    assert (found.mean, found.std, found.value) == (2.0, 1.0, 5.0)


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


def test_kernel_by_hand() -> None:
    kernel = gaussian_kernel(np.array([[0.0], [1.0], [3.0]]))  # squared distances 1, 4, 9
    assert kernel[0] == pytest.approx([1, np.exp(-1 / 8), np.exp(-9 / 8)])
    assert gaussian_kernel(np.ones((3, 2))) == pytest.approx(np.ones((3, 3)))


def test_a_test_of_one_law_rejects_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    p_values = [
        permutation_test(rng.normal(size=(8, 2)), rng.normal(size=(8, 2)), permutations=39).p_value
        for _ in range(400)
    ]
    assert np.mean([p <= 0.05 for p in p_values]) == pytest.approx(0.05, abs=0.035)
    assert np.mean([p <= 0.5 for p in p_values]) == pytest.approx(0.5, abs=0.08)


def test_groups_are_kept_apart() -> None:
    """Two captions of unlike images, counted differently on the two sides: one law a caption, but
    not one law of all items."""
    rng = np.random.default_rng(6)
    near, far = rng.normal(size=(40, 2)), rng.normal(size=(40, 2)) + 20
    first, second = np.concatenate([near[:30], far[:10]]), np.concatenate([near[30:], far[10:]])
    groups = ([0] * 30 + [1] * 10, [0] * 10 + [1] * 30)
    assert permutation_test(first, second).p_value < 0.01
    assert permutation_test(first, second, groups=groups).p_value > 0.05
    moved = second + 1.5  # and what differs within a caption is seen
    assert permutation_test(first, moved, groups=groups).p_value < 0.01
    with pytest.raises(OptionError, match="items of both sets"):
        permutation_test(first, second, groups=([0] * 40, [1] * 40))
    with pytest.raises(ShapeError, match="expected 40 and 40 numbers, received 1 and 40"):
        permutation_test(first, second, groups=([0], [1] * 40))
    with pytest.raises(OptionError, match="at least 19"):
        permutation_test(first, second, permutations=18)


def test_power_rises_with_the_shift_and_the_items() -> None:
    law = np.random.default_rng(7).normal(size=(100, 3)) * [3, 1, 1]
    options = {"shifts": (0.0, 0.5, 1.0, 2.0), "trials": 20, "level": 0.05, "permutations": 39}
    few, many = (measure_power(law, n, n, **options) for n in (10, 60))
    assert few.chances[0.0] <= 0.25 and many.chances[0.0] <= 0.25
    assert many.visible is not None and few.visible is not None and many.visible < few.visible
    assert max(many.chances) == many.visible  # no shift is tried behind the one that was seen
    assert measure_power(law, 3, 3, **(options | {"shifts": (0.0,)})).visible is None
    with pytest.raises(OptionError, match="at least 99 for level 0.01, received 39"):
        measure_power(law, 9, 9, permutations=39, level=0.01)


def test_features_that_float64_cannot_hold_are_refused_and_not_called_a_difference() -> None:
    """Distances that overflow are NaN, of which no labelling is "as large": a p-value of 0."""
    items = np.random.default_rng(0).normal(size=(20, 3))
    with pytest.raises(NumericsError, match="scale them"):
        permutation_test(items[:10] * 1e200, items[10:] * 1e200)
    with pytest.raises(NumericsError, match=r"up to .*e\+120"):
        squared_mmd(items[:10] * 1e120, items[10:] * 1e120)


def test_far_from_zero_distances_keep_their_digits() -> None:
    items = np.random.default_rng(0).normal(size=(40, 3)).round(3)
    near = permutation_test(items[:20], items[20:] + 1, permutations=99)
    far = permutation_test(items[:20] + 1e9, items[20:] + 1 + 1e9, permutations=99)
    assert far.statistic == pytest.approx(near.statistic, rel=1e-4)
