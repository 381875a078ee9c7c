"""Do two sets of features come from one law? A permutation test, and what it would have seen.

A. Gretton et al., "A Kernel Two-Sample Test", JMLR 13 (2012), 723-773: the squared maximum mean
discrepancy under a Gaussian kernel, whose width is the median distance of all items. Labels are
permuted, which gives the exact law of the statistic where both sets have one law; the p-value
counts the observed labels too and so never is 0 (B. Phipson, G. K. Smyth, 2010).

Departures: labels may be permuted within groups alone (pictures of one caption), where items of
different groups have different laws. Its power is in `mmaccel.evaluation.mmd_power`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmaccel.errors import NumericsError, OptionError, ShapeError
from mmaccel.evaluation.frechet import Array, check_features


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
    """Test whether two sets have one law.

    Args:
        first: `[N, D]`, at least 2 items, independent of each other and of `second`.
        second: `[M, D]`, at least 2 items.
        groups: N and M group numbers; labels are then permuted within a group alone. None: one
            group.
        permutations: labellings to draw.
        seed: of the draws.

    Raises:
        ShapeError, NumericsError: as `mmaccel.evaluation.frechet.check_features`, or groups of
            another length.
        OptionError: fewer than 19 permutations, or groups that leave nothing to permute.

    Cost: O((N + M)^2 (D + permutations)).
    """
    one, other = check_features(first, "first"), check_features(second, "second")
    if one.shape[1] != other.shape[1]:
        raise ShapeError(
            f"features: expected the same width on both sides, received {one.shape[1]} and "
            f"{other.shape[1]}; use one extractor for both"
        )
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
            "give items of one caption the same number"
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
