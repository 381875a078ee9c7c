"""Do two sets of features come from one distribution? A permutation test, and its power.

A. Gretton et al., "A Kernel Two-Sample Test", JMLR 13 (2012), 723-773: the squared maximum mean
discrepancy under a Gaussian kernel, whose width is the median distance of all items. Labels are
permuted, which gives the exact distribution of the statistic where both sets have one distribution;
the p-value counts the observed labels too and so never is 0 (B. Phipson, G. K. Smyth, 2010).

J. Cohen, "Statistical Power Analysis for the Behavioral Sciences", 2nd edition 1988: a test that
rejects nothing proves nothing. `measure_power` finds by simulation the smallest difference that the
test rejects four times out of five. The difference is a shift of all features along the direction
in which they vary most.

Departures: labels may be permuted within groups alone (images of one prompt), where items of
different groups have different distributions; scipy's `permutation_test` permutes all labels alike
and is not used for that reason. Items of every simulated test are drawn from all
features alike, also where labels are permuted within groups: the differences between groups are
noise there, so that the real test sees no less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmaccel.errors import NumericsError, OptionError, ShapeError
from mmaccel.evaluation.quality.frechet import Array, check_features, check_pair

SHIFTS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0)  # standard deviations
POWER = 0.8


@dataclass(frozen=True)
class PermutationTest:
    """Result of a permutation test.

    Attributes:
        statistic: squared discrepancy of the observed labels.
        p_value: share of labellings, the observed one included, with one as large.
        n_first, n_second: items.
        permutations: labellings drawn.
        least: below which no p-value of these sizes and groups can be; a test at a level under it
            cannot reject.
    """

    statistic: float
    p_value: float
    n_first: int
    n_second: int
    permutations: int
    least: float


def permutation_test(
    first: npt.ArrayLike,
    second: npt.ArrayLike,
    *,
    groups: tuple[Sequence[int], Sequence[int]] | None = None,
    permutations: int = 999,
    seed: int = 0,
) -> PermutationTest:
    """Test whether two sets have one distribution.

    Args:
        first: `[N, D]`, at least 2 items, independent of each other and of `second`.
        second: `[M, D]`, at least 2 items.
        groups: N and M group numbers; labels are then permuted within a group alone. None: one
            group.
        permutations: labellings to draw.
        seed: of the draws.

    Raises:
        ShapeError, NumericsError: as `check_pair`, or groups of another length.
        OptionError: fewer than 19 permutations, or groups that leave nothing to permute.

    Cost: O((N + M)^2 (D + permutations)).
    """
    one, other = check_pair(first, second)
    if permutations < 19:
        raise OptionError(
            f"permutations: expected at least 19, received {permutations}; fewer cannot reject at "
            "5 %, 999 are usual"
        )
    labels = np.arange(len(one) + len(other)) < len(one)
    members = _members(len(one), len(other), groups)
    if all(len(set(labels[own])) < 2 for own in members):
        raise OptionError(
            "groups: expected a group with items of both sets, received none; "
            "give items of one prompt the same number"
        )
    kernel, rng = gaussian_kernel(np.concatenate([one, other])), np.random.default_rng(seed)
    drawn = np.tile(labels, (permutations + 1, 1))  # [P + 1, N + M]; the first stays as observed
    for own in members:
        drawn[1:, own] = rng.permuted(drawn[1:, own], axis=1)
    found = _statistics(kernel, drawn)
    p_value = float((found >= found[0] - 1e-12 * abs(found[0])).mean())
    least = max(1 / (permutations + 1), _least(labels, members))
    return PermutationTest(float(found[0]), p_value, len(one), len(other), permutations, least)


def gaussian_kernel(items: Array) -> Array:
    """exp(-|x - y|^2 / (2 m^2)) of all pairs of `[N, D]`, `[N, N]`; m is the median distance of
    different items (1 where that is 0).

    Raises:
        NumericsError: features so large that their distances are not finite.
    """
    items = items - items.mean(0)  # distances stay, and keep their digits far from 0
    with np.errstate(over="ignore", invalid="ignore"):
        apart = _squared_distances(items)
    if not np.isfinite(apart).all():
        raise NumericsError(
            f"features: expected distances that float64 can hold, received features of up to "
            f"{np.abs(items).max():.3g}; scale them"
        )
    scale = float(np.median(apart[np.triu_indices(len(items), 1)]))
    kernel: Array = np.exp(-apart / (2 * (scale or 1.0)))
    return kernel


def _squared_distances(items: Array) -> Array:
    squares = (items * items).sum(1)
    apart: Array = np.maximum(squares[:, None] + squares[None] - 2 * items @ items.T, 0.0)
    np.fill_diagonal(apart, 0.0)
    return apart


def _statistics(kernel: Array, labels: npt.NDArray[np.bool_]) -> Array:
    """Unbiased squared discrepancies `[P]` of labellings `[P, N + M]`."""
    one = labels.astype(np.float64)
    n, m = one[0].sum(), len(kernel) - one[0].sum()
    own = np.diag(kernel)
    sums = one @ kernel  # [P, N + M]
    within = (sums * one).sum(1)
    across = (sums * (1 - one)).sum(1)
    rest = kernel.sum() - within - 2 * across
    within, rest = within - one @ own, rest - (1 - one) @ own
    found: Array = within / (n * (n - 1)) + rest / (m * (m - 1)) - 2 * across / (n * m)
    return found


def _members(
    n: int, m: int, groups: tuple[Sequence[int], Sequence[int]] | None
) -> list[npt.NDArray[np.intp]]:
    """Items of each group, counted over both sets."""
    if groups is None:
        return [np.arange(n + m)]
    if (len(groups[0]), len(groups[1])) != (n, m):
        raise ShapeError(
            f"groups: expected {n} and {m} numbers, received {len(groups[0])} and "
            f"{len(groups[1])}; give one for every item"
        )
    number = np.concatenate([np.asarray(groups[0]), np.asarray(groups[1])])
    return [np.flatnonzero(number == own) for own in np.unique(number)]


def _least(labels: npt.NDArray[np.bool_], members: Sequence[npt.NDArray[np.intp]]) -> float:
    """Share of labellings that are as extreme as any: of all that there are, one, or two where
    each group has as many of both sets, so that all labels may be swapped."""
    sizes = [(len(own), int(labels[own].sum())) for own in members]
    total = math.prod(math.comb(n, k) for n, k in sizes)
    return min(1.0, (1 + all(n == 2 * k for n, k in sizes)) / total)


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
    sizes: tuple[int, int],
    *,
    groups: tuple[Sequence[int], Sequence[int]] | None = None,
    level: float = 0.01,
    shifts: Sequence[float] = SHIFTS,
    trials: int = 50,
    permutations: int = 199,
    seed: int = 0,
) -> Power:
    """How often a test of these sizes rejects, were one set shifted.

    Both sets of every repetition are drawn from `features` with replacement; the second is moved
    along their first principal direction. Shifts are tested in rising order up to one that is seen.

    Args:
        features: `[K, D]`, the distribution of the trials.
        sizes: items of a repetition's two sets.
        groups: within which labels are permuted, as in `permutation_test`.
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
            one = pool[rng.integers(len(pool), size=sizes[0])]
            other = pool[rng.integers(len(pool), size=sizes[1])] + shift * step
            seeds = int(rng.integers(2**32))
            test = permutation_test(
                one, other, groups=groups, permutations=permutations, seed=seeds
            )
            rejected += test.p_value <= level
        chances[float(shift)] = rejected / trials
        if chances[float(shift)] >= POWER:
            return Power(level, chances, float(shift), trials)
    return Power(level, chances, None, trials)
