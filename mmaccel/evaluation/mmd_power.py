"""What a permutation test of features would have seen, by simulation.

J. Cohen, "Statistical Power Analysis for the Behavioral Sciences", 2nd edition 1988: a test that
rejects nothing proves nothing, so it states the smallest difference that it rejects four times out
of five. The difference is a shift of all features along the direction in which they vary most.

Departures: items of every trial are drawn from all features alike, also where labels are permuted
within groups; the differences between groups are noise there, so that the test they speak of sees
no less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmaccel.errors import OptionError
from mmaccel.evaluation.frechet import check_features
from mmaccel.evaluation.mmd import permutation_test

SHIFTS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0)  # standard deviations
POWER = 0.8


@dataclass(frozen=True)
class Power:
    """What a permutation test would have seen.

    Attributes:
        level: p-value at which it rejects.
        chances: shift in standard deviations to the share of simulated tests that rejected it.
        visible: the smallest shift rejected in `POWER` of them or more; None if none was.
        trials: simulated tests for each shift.
    """

    level: float
    chances: dict[float, float]
    visible: float | None
    trials: int


def measure_power(
    features: npt.ArrayLike,
    n_first: int,
    n_second: int,
    *,
    groups: tuple[Sequence[int], Sequence[int]] | None = None,
    level: float = 0.01,
    shifts: Sequence[float] = SHIFTS,
    trials: int = 50,
    permutations: int = 199,
    seed: int = 0,
) -> Power:
    """How often a test of these sizes rejects, were one set shifted.

    Both sets of every trial are drawn from `features` with replacement; the second is moved along
    their first principal direction. Shifts are tried in rising order up to one that is seen.

    Args:
        features: `[K, D]`, the law of the trials.
        n_first, n_second: items of a trial's sets.
        groups: within which labels are permuted, as in `mmaccel.evaluation.mmd.permutation_test`.
        level: p-value at which the test rejects.
        shifts: in standard deviations of that direction, rising.
        trials: tests for each shift.
        permutations: of each test; 1 / (permutations + 1) has to be at most `level`.
        seed: of everything drawn.

    Raises:
        OptionError: too few permutations for the level.
    """
    if (permutations + 1) * level < 1:
        raise OptionError(
            f"permutations: expected at least {int(np.ceil(1 / level)) - 1} for level {level:g}, "
            f"received {permutations}; no test of fewer can reject"
        )
    pool, rng = check_features(features), np.random.default_rng(seed)
    centred = pool - pool.mean(0)
    _, spread, axes = np.linalg.svd(centred, full_matrices=False)
    step = axes[0] * spread[0] / np.sqrt(len(pool) - 1)  # [D], one standard deviation
    chances: dict[float, float] = {}
    for shift in shifts:
        rejected = 0
        for _ in range(trials):
            one = pool[rng.integers(len(pool), size=n_first)]
            other = pool[rng.integers(len(pool), size=n_second)] + shift * step
            seeds = int(rng.integers(2**32))
            test = permutation_test(
                one, other, groups=groups, permutations=permutations, seed=seeds
            )
            rejected += test.p_value <= level
        chances[float(shift)] = rejected / trials
        if chances[float(shift)] >= POWER:
            return Power(level, chances, float(shift), trials)
    return Power(level, chances, None, trials)
