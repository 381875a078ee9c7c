"""Fréchet distance of two sets of features: FID, FVD and FAD, which differ in the features alone.

M. Heusel et al., "GANs Trained by a Two Time-Scale Update Rule Converge to a Local Nash
Equilibrium", 2017, arXiv 1706.08500, section 4 (images); T. Unterthiner et al., 2018, arXiv
1812.01717 (video); K. Kilgour et al., 2018, arXiv 1812.08466 (audio). Both sets are described by
mean and covariance; the result is the squared 2-Wasserstein distance of the two normal
distributions.

Departures: the trace of the root of S1 S2 is the sum of the singular values of S1^(1/2) S2^(1/2),
with roots of symmetric matrices, where the original takes a root of a product that is not
symmetric; moments of batches are merged as T. F. Chan, G. H. Golub, R. J. LeVeque, 1983, do it, so
that nothing large is subtracted from something large.
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
class Moments:
    """What a Fréchet distance needs of a set of features.

    Attributes:
        n: number of items.
        mean: `[D]` float64.
        scatter: `[D, D]` float64, sum of the outer products of the items less the mean.
    """

    n: int
    mean: Array
    scatter: Array

    @property
    def covariance(self) -> Array:
        """`[D, D]` float64, with n - 1 in the denominator."""
        return self.scatter / (self.n - 1)


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
    """Features as `[N, D]` float64.

    Args:
        features: `[N, D]`, any real dtype.
        name: what errors call them.
        least: items there have to be.

    Raises:
        ShapeError: other dimensions, complex numbers, or too few items.
        NumericsError: NaN or infinity.
    """
    if np.iscomplexobj(features):
        raise ShapeError(f"{name}: expected real numbers, received complex ones; take their parts")
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


def measure_moments(features: npt.ArrayLike) -> Moments:
    """Moments of one batch.

    Args:
        features: `[N, D]`, N of at least 1.

    Raises:
        ShapeError, NumericsError: as `check_features`.
    """
    array = check_features(features, least=1)
    mean = array.mean(0)
    centred = array - mean
    return Moments(len(array), mean, centred.T @ centred)


def merge_moments(first: Moments, second: Moments) -> Moments:
    """Moments of both batches together.

    Raises:
        ShapeError: features of unlike width.
    """
    _check_widths(len(first.mean), len(second.mean))
    n = first.n + second.n
    apart = second.mean - first.mean
    scatter = first.scatter + second.scatter + np.outer(apart, apart) * (first.n * second.n / n)
    return Moments(n, first.mean + apart * (second.n / n), scatter)


def frechet_distance(first: Moments, second: Moments) -> Frechet:
    """Distance of two sets described by their moments.

    Args:
        first: of at least 2 items.
        second: of at least 2 items, features of the same width.

    Raises:
        ShapeError: too few items, or features of unlike width.
        NumericsError: moments that are not finite.

    Cost: two symmetric eigenvalue problems and one singular value problem of D by D.
    """
    _check_widths(len(first.mean), len(second.mean))
    for name, moments in (("first", first), ("second", second)):
        if moments.n < 2:
            raise ShapeError(
                f"{name}: expected at least 2 items, received {moments.n}; a covariance needs two"
            )
        if not (np.isfinite(moments.mean).all() and np.isfinite(moments.scatter).all()):
            raise NumericsError(f"{name}: expected finite moments, received NaN or infinity")
    apart = first.mean - second.mean
    traces = np.trace(first.covariance) + np.trace(second.covariance)
    cross = _root(first.covariance).T @ _root(second.covariance)  # [rank, rank]
    shared = np.linalg.svd(cross, compute_uv=False).sum() if cross.size else 0.0
    distance = float(apart @ apart + traces - 2 * shared)
    bias = BIAS + FEW * (min(first.n, second.n) <= len(first.mean))
    return Frechet(max(0.0, distance), first.n, second.n, len(first.mean), bias)


def frechet_of(first: npt.ArrayLike, second: npt.ArrayLike) -> Frechet:
    """`frechet_distance` of two arrays `[N, D]` and `[M, D]`."""
    one, other = check_features(first, "first"), check_features(second, "second")
    return frechet_distance(measure_moments(one), measure_moments(other))


def frechet_floor(
    first: npt.ArrayLike, second: npt.ArrayLike, splits: int = 5, seed: int = 0
) -> float:
    """What noise alone gives at these numbers of items: mean distance of random splits of all items
    together into two sets of the same sizes.

    Args:
        first, second: `[N, D]` and `[M, D]`.
        splits, seed: how many, and of what seed.
    """
    one, other = check_features(first, "first"), check_features(second, "second")
    _check_widths(one.shape[1], other.shape[1])
    pool, rng = np.concatenate([one, other]), np.random.default_rng(seed)
    found = []
    for _ in range(splits):
        order = rng.permutation(len(pool))
        halves = pool[order[: len(one)]], pool[order[len(one) :]]
        found.append(frechet_distance(*map(measure_moments, halves)).distance)
    return float(np.mean(found))


def _root(covariance: Array) -> Array:
    """`[D, rank]` A with A A^T the covariance; directions without variance are left out, whose
    rounding errors a root would blow up from 1e-16 to 1e-8."""
    values, vectors = np.linalg.eigh(covariance)
    is_used = values > len(values) * np.finfo(np.float64).eps * max(values[-1], 0.0)
    root: Array = vectors[:, is_used] * np.sqrt(values[is_used])
    return root


def _check_widths(first: int, second: int) -> None:
    if first != second:
        raise ShapeError(
            f"features: expected the same width on both sides, received {first} and {second}; "
            "use one extractor for both"
        )
