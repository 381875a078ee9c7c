"""Distances of two sets of features: Fréchet (FID, FVD, FAD, which differ in the features) and KID.

M. Heusel et al., "GANs Trained by a Two Time-Scale Update Rule Converge to a Local Nash
Equilibrium", 2017, arXiv 1706.08500, section 4 (images); T. Unterthiner et al., 2018, arXiv
1812.01717 (video); K. Kilgour et al., 2018, arXiv 1812.08466 (audio): the squared 2-Wasserstein
distance of the normal distributions of both sets' means and covariances.

M. Bińkowski et al., "Demystifying MMD GANs", ICLR 2018, arXiv 1801.01401, section 4: the squared
maximum mean discrepancy under k(x, y) = (x y / D + 1)^3, unbiased: it leaves out what an item has
in common with itself.

Departures: the trace of the root of S1 S2 is the sum of the singular values of S1^(1/2) S2^(1/2),
with roots of symmetric matrices, where the original takes a root of a product that is not
symmetric. Next to KID's mean over random subsets, which is what others print, stands the estimate
over all pairs, which has the least variance and needs no choice of a subset size.

torchmetrics is not used, but compared in a test. Its Fréchet distance takes eigenvalues of the
product: rounding is 0.1 % of the value at 100 items of 2048 features. Its KID divides the sums of
both sets by the size of the first, wrong for two folders of unlike numbers of images.
"""

from __future__ import annotations

import math
from typing import Any

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
_KID_BIAS = "unbiased: its mean does not depend on n, its noise does; below 0 is noise"
_BLOCK = 2048  # rows of a block of the kernel's matrix


def check_features(features: npt.ArrayLike, name: str = "features", least: int = 2) -> Array:
    """Features as `[N, D]` float64, of at least `least` items; ShapeError or NumericsError."""
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
    """Two sets of features, `[N, D]` and `[M, D]` float64, of at least 2 items each."""
    one, other = check_features(first, "first"), check_features(second, "second")
    if one.shape[1] != other.shape[1]:
        raise ShapeError(
            f"features: expected the same width on both sides, received {one.shape[1]} and "
            f"{other.shape[1]}; use one extractor for both"
        )
    return one, other


def measure_distances(
    first: npt.ArrayLike, second: npt.ArrayLike, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Fréchet distance with its floor, and KID, of features `[N, D]` and `[M, D]`, ready for JSON;
    `seed` is that of splits and subsets.

    Cost: two symmetric eigenvalue problems and one singular value problem of D by D, six times; and
    O((N + M)^2 D), in blocks of 2048 rows.
    """
    one, other = check_pair(first, second)
    width = one.shape[1]
    sizes = {"n_first": len(one), "n_second": len(other), "width": width}
    few = FEW if min(len(one), len(other)) <= width else ""
    frechet = {"distance": frechet_distance(one, other), **sizes, "bias": BIAS + few}
    frechet["floor"] = frechet_floor(one, other, seed=seed)
    kid = {**measure_kid(one, other, seed=seed), **sizes, "bias": _KID_BIAS}
    return {"frechet": frechet, "kid": kid}


def frechet_distance(first: npt.ArrayLike, second: npt.ArrayLike) -> float:
    one, other = check_pair(first, second)
    apart = one.mean(0) - other.mean(0)
    covariances = [np.atleast_2d(np.cov(items, rowvar=False)) for items in (one, other)]
    cross = _root(covariances[0]).T @ _root(covariances[1])  # [rank, rank]
    shared = np.linalg.svd(cross, compute_uv=False).sum() if cross.size else 0.0
    return max(0.0, float(apart @ apart + sum(map(np.trace, covariances)) - 2 * shared))


def _root(covariance: Array) -> Array:
    """`[D, rank]` A with A A^T the covariance; directions without variance are left out, whose
    rounding errors a root would blow up from 1e-16 to 1e-8."""
    values, vectors = np.linalg.eigh(covariance)
    is_used = values > len(values) * np.finfo(np.float64).eps * max(values[-1], 0.0)
    root: Array = vectors[:, is_used] * np.sqrt(values[is_used])
    return root


def frechet_floor(one: Array, other: Array, splits: int = 5, seed: int = 0) -> float:
    """Mean distance of random splits of all items into two sets of the same sizes: noise alone."""
    pool = np.concatenate([one, other])
    rng = np.random.default_rng(seed)
    mixed = [pool[rng.permutation(len(pool))] for _ in range(splits)]
    distances = [frechet_distance(each[: len(one)], each[len(one) :]) for each in mixed]
    return float(np.mean(distances))


def measure_kid(
    one: Array, other: Array, subsets: int = 100, subset_size: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """`value` over all pairs; `mean` and `std` (the number of subsets in its denominator) over
    random `subsets` of `subset_size` items, cut to the smaller set."""
    size, rng = min(subset_size, len(one), len(other)), np.random.default_rng(seed)
    values = []
    for _ in range(subsets):
        parts = (side[rng.choice(len(side), size, replace=False)] for side in (one, other))
        values.append(squared_mmd(*parts))
    drawn = {"mean": float(np.mean(values)), "std": float(np.std(values))}
    value = squared_mmd(one, other)
    return {"value": value, **drawn, "subsets": subsets, "subset_size": size}


def squared_mmd(first: npt.ArrayLike, second: npt.ArrayLike) -> float:
    one, other = check_pair(first, second)
    n, m = len(one), len(other)
    with np.errstate(over="ignore", invalid="ignore"):
        own = []
        for side in (one, other):
            alone = ((side * side).sum(1) / side.shape[1] + 1) ** 3  # each item with itself
            own.append((_sum(side, side) - float(alone.sum())) / (len(side) * (len(side) - 1)))
        value = own[0] + own[1] - 2 * _sum(one, other) / (n * m)
    if not math.isfinite(value):
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
