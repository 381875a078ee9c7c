"""Nearest codes: the same index, for one lookup and for chains of them.

Vectors of small integers make every score exact in float32 whatever the order of its sum, so codes
have to be equal, ties included. Real numbers round: there a code may differ from the
specification's only if both lie equally near within `SLACK` of the terms a score is made of.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mmaccel.kernels.nearest_code import nearest_code, nearest_codes_residual
from tests.kernels.case import Case, Lane

SLACK = 1e-5  # relative; sums of up to 256 float32 products err by about 256 * 6e-8


def _integers(lane: Lane, *shape: int, high: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-high, high + 1, shape, generator=generator)
    return drawn.to(lane.device, lane.dtype)


def _sizes(n_vectors: int, n_codes: int, width: int, lane: Lane) -> None:
    """Few values a column, so that a third or so of the vectors has several nearest codes."""
    vectors = _integers(lane, n_vectors, width, high=2, seed=1)
    lane.compare(nearest_code, vectors, _integers(lane, n_codes, width, high=2, seed=2))


def _ties(lane: Lane) -> None:
    """Every code stands there five times, over blocks and parts; the first of them is wanted."""
    codebook = _integers(lane, 40, 6, high=3, seed=3).float().unique(dim=0).to(lane.dtype)
    wanted = torch.arange(50, device=lane.device) % len(codebook)
    vectors, repeated = codebook[wanted], codebook.repeat(5, 1)
    assert torch.equal(lane.compare(nearest_code, vectors, repeated), wanted)
    assert not bool(lane.compare(nearest_code, vectors, torch.ones_like(repeated)).any())


def _strides(lane: Lane) -> None:
    """A transposed image, every second row of a codebook with its columns turned around."""
    vectors = _integers(lane, 10, 37, high=4, seed=4).t()
    lane.compare(nearest_code, vectors, _integers(lane, 150, 20, high=4, seed=5)[::2, 5:15])
    books = _integers(lane, 70, 3, 10, high=4, seed=6).transpose(0, 1)
    lane.compare(nearest_codes_residual, vectors, books)


def _mixed(lane: Lane) -> None:
    """float32 vectors and a codebook in another dtype, and the other way round."""
    vectors, codebook = (_integers(lane, n, 17, high=3, seed=n) for n in (33, 65))
    lane.compare(nearest_code, vectors.float() + 0.25 / 1024, codebook)
    lane.compare(nearest_code, vectors, codebook.float())


def _reals(n_vectors: int, n_codes: int, width: int, lane: Lane) -> None:
    vectors, codebook = (lane.normal(n, width, seed=n) for n in (n_vectors, n_codes))
    expected = nearest_code(vectors, codebook)
    found = lane.call(nearest_code, vectors, codebook)
    x, far, near = vectors.double(), codebook.double()[found], codebook.double()[expected]
    worse = (x - far).square().sum(1) - (x - near).square().sum(1)
    terms = x.square().sum(1) + far.square().sum(1)
    assert bool((worse.abs() <= SLACK * terms).all())
    assert float((found == expected).float().mean()) > 0.99


def _chain(n_vectors: int, n_books: int, n_codes: int, width: int, lane: Lane) -> None:
    vectors = _integers(lane, n_vectors, width, high=9, seed=10)
    books = _integers(lane, n_books, n_codes, width, high=4, seed=11)
    lane.compare(nearest_codes_residual, vectors, books)  # what is left: subtraction alone


def _nothing(lane: Lane) -> None:
    """No vectors, or no codebooks: nothing is launched."""
    codebook = torch.ones(3, 4, dtype=lane.dtype, device=lane.device)
    lane.compare(nearest_code, codebook[:0], codebook)
    lane.compare(nearest_codes_residual, codebook[:0], codebook[None])
    lane.compare(nearest_codes_residual, codebook, codebook[None][:0])


_SIZES = ((1, 1, 1), (63, 33, 4), (33, 100, 8), (32, 64, 16), (31, 63, 17), (5, 1023, 33))
CASES = [Case(f"lookup {n} x {k} x {d}", partial(_sizes, n, k, d)) for n, k, d in _SIZES]
CASES += [
    Case("ties", _ties),
    Case("strides", _strides),
    Case("mixed dtypes", _mixed),
    Case("reals", partial(_reals, 65, 127, 40)),
    Case("chain of 3 x 100 x 8", partial(_chain, 17, 3, 100, 8)),
    Case("chain of 4 x 65 x 33", partial(_chain, 15, 4, 65, 33)),
    Case("chain of 1 x 1 x 1", partial(_chain, 1, 1, 1, 1)),
    Case("nothing", _nothing),
    Case("lookup of an image", partial(_reals, 4096, 16384, 8), large=True),
    Case("lookup of wide codes", partial(_reals, 1024, 8192, 256), large=True),
    Case("chain of speech", partial(_chain, 1500, 8, 1024, 128), large=True),
]
