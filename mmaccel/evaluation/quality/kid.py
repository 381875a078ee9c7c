"""Kernel distance of two sets of features: KID.

M. Bińkowski et al., "Demystifying MMD GANs", ICLR 2018, arXiv 1801.01401, section 4: the squared
maximum mean discrepancy under k(x, y) = (x y / D + 1)^3. Its estimate leaves out what an item has
in common with itself and is unbiased: few items give a noisy answer and not a wrong one.

Departures: next to the mean over random subsets, which is what others print, the estimate over all
pairs is computed, in blocks; it has the least variance and needs no choice of a subset size.

torchmetrics' KID gives the same numbers for the same subsets, which a test checks. It is not used
because it divides the sums of both sets by the size of the first, so that the estimate over all
pairs, which the report gives first, comes out wrong for two folders of unlike numbers of images.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmaccel.errors import NumericsError
from mmaccel.evaluation.quality.frechet import Array, check_pair

BIAS = "unbiased: its mean does not depend on n, its noise does; below 0 is noise"
_BLOCK = 2048  # rows of a block of the kernel's matrix


@dataclass(frozen=True)
class Kid:
    """A kernel distance and what it rests on.

    Attributes:
        value: over all pairs.
        mean: over the subsets.
        std: between the subsets, with their number in the denominator; NaN without subsets.
        subsets, subset_size: number and size of them.
        n_first, n_second: items.
        width: D.
        bias: what the number of items does to it, in words.
    """

    value: float
    mean: float
    std: float
    subsets: int
    subset_size: int
    n_first: int
    n_second: int
    width: int
    bias: str = BIAS


def measure_kid(
    first: npt.ArrayLike,
    second: npt.ArrayLike,
    *,
    subsets: int = 100,
    subset_size: int = 1000,
    seed: int = 0,
) -> Kid:
    """Kernel distance of two sets `[N, D]` and `[M, D]` of at least 2 items.

    Args:
        first, second: see above.
        subsets: how many pairs of subsets are drawn; 0 draws none.
        subset_size: items of each; cut to the smaller set.
        seed: of the draws.

    Raises:
        ShapeError, NumericsError: as `squared_mmd`.

    Cost: O((N + M)^2 D), in blocks of 2048 rows.
    """
    one, other = check_pair(first, second)
    size, rng = min(subset_size, len(one), len(other)), np.random.default_rng(seed)
    found = []
    for _ in range(subsets):
        own, theirs = (side[rng.choice(len(side), size, replace=False)] for side in (one, other))
        found.append(squared_mmd(own, theirs))
    value = squared_mmd(one, other)
    mean, std = (float(np.mean(found)), float(np.std(found))) if found else (value, float("nan"))
    return Kid(value, mean, std, subsets, size, len(one), len(other), one.shape[1])


def squared_mmd(first: npt.ArrayLike, second: npt.ArrayLike) -> float:
    """Unbiased estimate over all pairs.

    Raises:
        ShapeError, NumericsError: as `check_pair`, or features too large to be cubed.
    """
    one, other = check_pair(first, second)
    n, m = len(one), len(other)
    with np.errstate(over="ignore", invalid="ignore"):
        own = [_sum(side, side) - float(_kernel(side).sum()) for side in (one, other)]
        value = own[0] / (n * (n - 1)) + own[1] / (m * (m - 1)) - 2 * _sum(one, other) / (n * m)
    if not np.isfinite(value):
        largest = max(float(np.abs(side).max()) for side in (one, other))
        raise NumericsError(
            f"features: expected cubes that float64 can hold, received features of up to "
            f"{largest:.3g}; scale them"
        )
    return value


def _sum(first: Array, second: Array) -> float:
    """(x y / D + 1)^3 over all pairs of `[N, D]` and `[M, D]`."""
    blocks = (first[k : k + _BLOCK] for k in range(0, len(first), _BLOCK))
    return sum(float(((x @ second.T / x.shape[1] + 1) ** 3).sum()) for x in blocks)


def _kernel(items: Array) -> Array:
    """The same of each item with itself, `[N]`."""
    kernel: Array = ((items * items).sum(1) / items.shape[1] + 1) ** 3
    return kernel
