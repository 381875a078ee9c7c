"""Fréchet distance of two sets of features: FID, FVD and FAD, which differ in the features alone.

M. Heusel et al., "GANs Trained by a Two Time-Scale Update Rule Converge to a Local Nash
Equilibrium", 2017, arXiv 1706.08500, section 4 (images); T. Unterthiner et al., 2018, arXiv
1812.01717 (video); K. Kilgour et al., 2018, arXiv 1812.08466 (audio). Both sets are described by
mean and covariance; the result is the squared 2-Wasserstein distance of the two normal
distributions.

Departures: the trace of the root of S1 S2 is the sum of the singular values of S1^(1/2) S2^(1/2),
with roots of symmetric matrices, where the original takes a root of a product that is not
symmetric. torchmetrics takes eigenvalues of that product. A test checks that it gives the same
number, but with fewer items than features its rounding errors are seen: 0.1 % of the value at 100
items of 2048 features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmaccel.errors import NumericsError, ShapeError

Array = npt.NDArray[np.float64]

BIAS = (
    "biased: two samples of one distribution are a distance above 0 that falls with n; compare "
    "values of equal n and equal features alone"
)
FEW = (
    "; n is not above the width D, so that a covariance is of low rank and the value of little use"
)


@dataclass(frozen=True)
class Frechet:
    """A distance and what it rests on.

    Attributes:
        distance: squared 2-Wasserstein distance of the two normal distributions.
        n_first, n_second: items.
        width: D.
        bias: what the number of items does to it, in words.
    """

    distance: float
    n_first: int
    n_second: int
    width: int
    bias: str = BIAS


def check_features(features: npt.ArrayLike, name: str = "features", least: int = 2) -> Array:
    """Features as `[N, D]` float64, of at least `least` items.

    Raises:
        ShapeError: other dimensions, or too few items.
        NumericsError: NaN or infinity.
    """
    array = np.asarray(features, dtype=np.float64)
    if array.ndim != 2 or array.shape[0] < least or array.shape[1] < 1:
        raise ShapeError(
            f"{name}: expected [N, D] with N of at least {least}, received {list(array.shape)}; "
            "give one row of features for every item"
        )
    if not np.isfinite(array).all():
        bad = int((~np.isfinite(array)).any(1).sum())
        raise NumericsError(
            f"{name}: expected finite numbers, received NaN or infinity in {bad} of "
            f"{len(array)} rows; check what the extractor was given"
        )
    return array


def check_pair(first: npt.ArrayLike, second: npt.ArrayLike) -> tuple[Array, Array]:
    """Two sets of features, `[N, D]` and `[M, D]` float64, of at least 2 items each.

    Raises:
        ShapeError, NumericsError: as `check_features`, or unlike widths.
    """
    one, other = check_features(first, "first"), check_features(second, "second")
    if one.shape[1] != other.shape[1]:
        raise ShapeError(
            f"features: expected the same width on both sides, received {one.shape[1]} and "
            f"{other.shape[1]}; use one extractor for both"
        )
    return one, other


def frechet_of(first: npt.ArrayLike, second: npt.ArrayLike) -> Frechet:
    """Distance of two sets `[N, D]` and `[M, D]` of at least 2 items.

    Raises:
        ShapeError, NumericsError: as `check_pair`.

    Cost: two symmetric eigenvalue problems and one singular value problem of D by D.
    """
    one, other = check_pair(first, second)
    width = one.shape[1]
    bias = BIAS + FEW if min(len(one), len(other)) <= width else BIAS
    return Frechet(_distance(one, other), len(one), len(other), width, bias)


def frechet_floor(
    first: npt.ArrayLike, second: npt.ArrayLike, splits: int = 5, seed: int = 0
) -> float:
    """What noise alone gives at these numbers of items: mean distance of random splits of all items
    together into two sets of the same sizes.
    """
    one, other = check_pair(first, second)
    pool = np.concatenate([one, other])
    rng = np.random.default_rng(seed)
    mixed = [pool[rng.permutation(len(pool))] for _ in range(splits)]
    return float(np.mean([_distance(each[: len(one)], each[len(one) :]) for each in mixed]))


def _distance(one: Array, other: Array) -> float:
    """Of `[N, D]` and `[M, D]`."""
    apart = one.mean(0) - other.mean(0)
    first, second = (np.atleast_2d(np.cov(items, rowvar=False)) for items in (one, other))
    cross = _root(first).T @ _root(second)  # [rank, rank]
    shared = np.linalg.svd(cross, compute_uv=False).sum() if cross.size else 0.0
    return max(0.0, float(apart @ apart + np.trace(first) + np.trace(second) - 2 * shared))


def _root(covariance: Array) -> Array:
    """`[D, rank]` A with A A^T the covariance; directions without variance are left out, whose
    rounding errors a root would blow up from 1e-16 to 1e-8."""
    values, vectors = np.linalg.eigh(covariance)
    is_used = values > len(values) * np.finfo(np.float64).eps * max(values[-1], 0.0)
    root: Array = vectors[:, is_used] * np.sqrt(values[is_used])
    return root
