"""Residual addition and norms.

Tolerance: a mean of up to 5000 squares in another order of summing, and one rounding to the dtype.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from mmaccel.kernels.add_norm import add_norm
from mmaccel.kernels.norm import Norm, NormKind
from tests.kernels.case import Case, Lane


def draw(lane: Lane, *shape: int, seed: int) -> Tensor:
    """Numbers around 0.3, so that a mean that is not subtracted is seen."""
    return lane.normal(*shape, seed=seed, mean=0.3)


def _rows(width: int, kind: NormKind, lane: Lane) -> None:
    """With and without update, weight and bias; an offset, a scale, a large eps."""
    hidden, update = (draw(lane, 2, width, seed=seed) for seed in (1, 2))
    weight, bias = (draw(lane, width, seed=seed) for seed in (3, 4))
    compare = partial(lane.compare, add_norm, hidden, tolerance=2 * lane.rounding)
    compare(update, Norm(weight, None, kind))
    compare(None, Norm(weight, bias, kind))
    compare(update, Norm(weight, bias, kind, 1.0, 0.5), scale=0.25)
    compare(update, Norm(None, None, kind))
    compare(None, None)
    compare(update, None, scale=0.25)


def _posts(width: int, kind: NormKind, lane: Lane) -> None:
    """A norm of the update, with everything else and alone; of rows that lie in wider ones."""
    hidden, update = (draw(lane, 2, width + 3, seed=seed)[:, 2:-1] for seed in (1, 2))
    weight, bias, other = (draw(lane, width, seed=seed) for seed in (3, 4, 5))
    compare = partial(lane.compare, add_norm, hidden, update, tolerance=2 * lane.rounding)
    for post in (Norm(weight, bias, kind, 1.0, 0.5), Norm(None, None, kind)):
        compare(Norm(other, None, "rms"), post=post, scale=0.25)
        compare(Norm(other, bias, "layer", 1.0, 1e-5), post=post)
        compare(None, post=post)


_NORMS: list[tuple[int, NormKind]] = [(n, k) for n in (1, 33, 128, 5000) for k in ("rms", "layer")]
CASES = [Case(f"{k} of {n}", partial(_rows, n, k)) for n, k in _NORMS]
CASES += [Case(f"{k} of {n} before the addition", partial(_posts, n, k)) for n, k in _NORMS]
