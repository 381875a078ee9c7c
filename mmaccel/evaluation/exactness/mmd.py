"""Do two sets of features come from one distribution? A permutation test, and its power.

A. Gretton et al., "A Kernel Two-Sample Test", JMLR 13 (2012), 723-773: the squared maximum mean
discrepancy under a Gaussian kernel, whose width is the median distance of all items. Permuted
labels give its exact distribution where both sets have one; the p-value counts the observed labels
too and so never is 0 (B. Phipson, G. K. Smyth, 2010).

J. Cohen, "Statistical Power Analysis for the Behavioral Sciences", 2nd edition 1988:
`measure_power` simulates the smallest shift of all features along the direction in which they vary
most that the test rejects four times out of five.

Departures: labels may be permuted within groups alone (images of one prompt), where items of
different groups have different distributions; scipy's `permutation_test` permutes all alike. Items
of every simulated test are drawn from all features alike, groups or not: differences between groups
are noise there, so that the real test sees no less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmaccel.errors import NumericsError, OptionError
from mmaccel.evaluation.quality.distances import Array, check_features, check_pair

SHIFTS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0)  # standard deviations
POWER = 0.8
# A group number for each item of both sets; labels are permuted within a group alone.
Groups = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True)
class PermutationTest:
    """Result of a permutation test."""

    statistic: float  # squared discrepancy of the observed labels
    p_value: float  # share of labellings, the observed one included, with one as large
    n_first: int
    n_second: int
    permutations: int
    least: float  # the least p-value of these sizes and groups; no level under it can reject


def permutation_test(
    first: npt.ArrayLike,
    second: npt.ArrayLike,
    *,
    groups: Groups | None = None,
    permutations: int = 999,
    seed: int = 0,
) -> PermutationTest:
    """Test whether two sets `[N, D]` and `[M, D]` have one distribution, of at least 2 items each,
    all independent. Fewer than 19 permutations cannot reject at 5 %.

    Cost: O((N + M)^2 (D + permutations)).
    """
    one, other = check_pair(first, second)
    total = len(one) + len(other)
    labels = np.arange(total) < len(one)
    numbers = np.zeros(total) if groups is None else np.concatenate(groups)
    members = [np.flatnonzero(numbers == own) for own in np.unique(numbers)]
    sizes = [(len(own), int(labels[own].sum())) for own in members]
    if all(n_first in (0, n) for n, n_first in sizes):
        raise OptionError(
            "groups: expected a group with items of both sets, received none; "
            "give items of one prompt the same number"
        )
    kernel, rng = gaussian_kernel(np.concatenate([one, other])), np.random.default_rng(seed)
    drawn = np.tile(labels, (permutations + 1, 1))  # [P + 1, N + M]; the first stays as observed
    for own in members:
        drawn[1:, own] = rng.permuted(drawn[1:, own], axis=1)
    drawn_statistics = _statistics(kernel, drawn)
    p_value = float(
        (drawn_statistics >= drawn_statistics[0] - 1e-12 * abs(drawn_statistics[0])).mean()
    )
    # of all labellings one is as extreme as any, or two where all labels may be swapped
    extreme = 1 + all(n == 2 * n_first for n, n_first in sizes)
    least = min(1.0, extreme / math.prod(math.comb(*size) for size in sizes))
    least = max(1 / (permutations + 1), least)
    return PermutationTest(
        float(drawn_statistics[0]), p_value, len(one), len(other), permutations, least
    )


def gaussian_kernel(items: Array) -> Array:
    """exp(-|x - y|^2 / (2 m^2)) `[N, N]` of `[N, D]`; m is the median distance, 1 where it is 0."""
    items = items - items.mean(0)  # distances stay, and keep their digits far from 0
    with np.errstate(over="ignore", invalid="ignore"):
        squares = (items * items).sum(1)
        apart = np.maximum(squares[:, None] + squares[None] - 2 * items @ items.T, 0.0)
    np.fill_diagonal(apart, 0.0)
    if not np.isfinite(apart).all():
        raise NumericsError(
            f"features: expected distances that float64 can hold, received features of up to "
            f"{np.abs(items).max():.3g}; scale them"
        )
    scale = float(np.median(apart[np.triu_indices(len(items), 1)]))
    kernel: Array = np.exp(-apart / (2 * (scale or 1.0)))
    return kernel


def _statistics(kernel: Array, labels: npt.NDArray[np.bool_]) -> Array:
    """Unbiased squared discrepancies `[P]` of labellings `[P, N + M]`; the kernel's diagonal is
    1."""
    one = labels.astype(np.float64)
    n = one[0].sum()
    m = len(kernel) - n
    sums = one @ kernel  # [P, N + M]
    within = (sums * one).sum(1)
    across = (sums * (1 - one)).sum(1)
    rest = kernel.sum() - within - 2 * across
    squared: Array = (
        (within - n) / (n * (n - 1)) + (rest - m) / (m * (m - 1)) - 2 * across / (n * m)
    )
    return squared


@dataclass(frozen=True)
class Power:
    """What a permutation test would have seen."""

    level: float  # p-value at which it rejects
    # shift in standard deviations to the share of simulated tests that rejected it
    chances: dict[float, float]
    # the smallest shift rejected in `POWER` of them or more; None if none was
    visible: float | None
    trials: int  # simulated tests for each shift


def measure_power(
    features: npt.ArrayLike,
    sizes: tuple[int, int],
    *,
    groups: Groups | None = None,
    level: float = 0.01,
    shifts: Sequence[float] = SHIFTS,
    trials: int = 50,
    permutations: int = 199,
    seed: int = 0,
) -> Power:
    """How often a test of these sizes rejects, were one set shifted.

    Both sets of a trial are drawn from `features` `[K, D]` with replacement; the second is moved
    along their first principal direction, by rising shifts in its standard deviations up to one
    that is seen. A `level` is 1 / (permutations + 1) or more.
    """
    pool, rng = check_features(features), np.random.default_rng(seed)
    _, spread, axes = np.linalg.svd(pool - pool.mean(0), full_matrices=False)
    step = axes[0] * spread[0] / np.sqrt(len(pool) - 1)  # [D], one standard deviation
    chances: dict[float, float] = {}
    for shift in map(float, shifts):
        rejected = 0
        for _ in range(trials):
            one, other = (pool[rng.integers(len(pool), size=size)] for size in sizes)
            own_seed = int(rng.integers(2**32))
            test = permutation_test(
                one, other + shift * step, groups=groups, permutations=permutations, seed=own_seed
            )
            rejected += test.p_value <= level
        chances[shift] = rejected / trials
        if chances[shift] >= POWER:
            return Power(level, chances, shift, trials)
    return Power(level, chances, None, trials)
