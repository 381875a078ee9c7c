"""The p-value of the permutation test: the labels as they were observed are one of the labellings.

The rest of the test is with KID, whose statistic it shares.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from mmaccel.evaluation.exactness import mmd
from mmaccel.evaluation.exactness.mmd import permutation_test


@pytest.mark.parametrize("permutations", [19, 99, 999])
def test_sets_that_nothing_mixes_have_the_least_p_value_and_never_0(permutations: int) -> None:
    """No drawn labelling of 2 * 30 items is as extreme: the observed one is all that counts."""
    items = np.random.default_rng(0).normal(size=(60, 2))
    found = permutation_test(items[:30], items[30:] + 50, permutations=permutations)
    assert found.p_value == found.least == 1 / (permutations + 1)
    assert found.permutations == permutations


@pytest.mark.parametrize(("drawn_as_large", "wanted"), [(0, 0.05), (1, 0.1), (7, 0.4), (19, 1.0)])
def test_labellings_are_counted_by_hand(
    monkeypatch: pytest.MonkeyPatch, drawn_as_large: int, wanted: float
) -> None:
    """Of 19 drawn ones, and the observed one beside them."""
    values = np.array([1.0, *[1.0] * drawn_as_large, *[0.5] * (19 - drawn_as_large)])
    monkeypatch.setattr(mmd, "_statistics", lambda kernel, labels: values)
    found = permutation_test(np.zeros((3, 1)), np.ones((3, 1)), permutations=19)
    assert found.p_value == pytest.approx(wanted, rel=1e-12) and found.statistic == 1.0


def test_the_first_labelling_is_the_observed_one_and_the_others_have_its_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[np.ndarray] = []
    statistics = mmd._statistics

    def look(kernel: np.ndarray, labels: np.ndarray) -> np.ndarray:
        seen.append(labels)
        return statistics(kernel, labels)

    monkeypatch.setattr(mmd, "_statistics", look)
    rng = np.random.default_rng(1)
    permutation_test(rng.normal(size=(2, 3)), rng.normal(size=(4, 3)), permutations=400)
    (labels,) = seen
    assert labels.shape == (401, 6) and labels[0].tolist() == [True] * 2 + [False] * 4
    drawn = {tuple(np.flatnonzero(row).tolist()) for row in labels[1:]}
    assert drawn == set(combinations(range(6), 2))  # all 15 of them, the observed one too
