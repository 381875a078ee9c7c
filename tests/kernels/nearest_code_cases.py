"""Nearest codes: the specification's index, for one lookup and for chains of them.

Vectors of small integers make every score exact in float32 whatever the order of its sum, so codes
have to be equal, ties included. Real numbers round: there a code may differ from the
specification's only if both lie equally near within `SLACK` of the terms a score is made of.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mmaccel.kernels import nearest_code as torch_twin
from mmaccel.kernels import nearest_code_triton as triton_twin
from tests.kernels.case import Case

SLACK = 1e-5  # relative; sums of up to 256 float32 products err by about 256 * 6e-8


def _integers(shape: tuple[int, ...], high: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-high, high + 1, shape, generator=generator).float()


def _equal(vectors: Tensor, codebook: Tensor) -> None:
    assert triton_twin.refuse_nearest_code(vectors, codebook) is None
    found = triton_twin.nearest_code(vectors, codebook)
    assert found.dtype == torch.int64 and found.shape == vectors.shape[:1]
    assert torch.equal(found, torch_twin.nearest_code(vectors, codebook))


def _sizes(
    n_vectors: int, n_codes: int, width: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Few values a column, so that a third or so of the vectors has several nearest codes."""
    vectors = _integers((n_vectors, width), 2, 1).to(device, dtype)
    _equal(vectors, _integers((n_codes, width), 2, 2).to(device, dtype))


def _ties(device: torch.device, dtype: torch.dtype) -> None:
    """Every code stands there five times, over blocks and parts; the first of them is wanted."""
    codebook = _integers((40, 6), 3, 3).unique(dim=0)
    vectors = codebook[torch.arange(50) % len(codebook)].to(device, dtype)
    wanted = torch.arange(50, device=device) % len(codebook)
    repeated = codebook.repeat(5, 1).to(device, dtype)
    assert torch.equal(triton_twin.nearest_code(vectors, repeated), wanted)
    assert not bool(triton_twin.nearest_code(vectors, torch.ones_like(repeated)).any())


def _strides(device: torch.device, dtype: torch.dtype) -> None:
    """A transposed image, every second row of a codebook with its columns turned around."""
    vectors = _integers((10, 37), 4, 4).to(device, dtype).t()
    codebook = _integers((150, 20), 4, 5).to(device, dtype)[::2, 5:15]
    _equal(vectors, codebook)
    books = _integers((70, 3, 10), 4, 6).to(device, dtype).transpose(0, 1)
    assert not books.is_contiguous() and not vectors.is_contiguous()
    _chain_equal(vectors, books)
    assert torch.equal(vectors, _integers((10, 37), 4, 4).to(device, dtype).t())  # left alone


def _mixed(device: torch.device, dtype: torch.dtype) -> None:
    """float32 vectors and a codebook in another dtype, and the other way round."""
    vectors, codebook = _integers((33, 17), 3, 7).to(device), _integers((65, 17), 3, 8).to(device)
    _equal(vectors + 0.25 / 1024, codebook.to(dtype))
    _equal(vectors.to(dtype), codebook)


def _reals(
    n_vectors: int, n_codes: int, width: int, device: torch.device, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(9)
    vectors = torch.randn(n_vectors, width, generator=generator).to(device, dtype)
    codebook = torch.randn(n_codes, width, generator=generator).to(device, dtype)
    expected = torch_twin.nearest_code(vectors, codebook)
    found = triton_twin.nearest_code(vectors, codebook)
    x, far = vectors.double(), codebook.double()[found]
    near = codebook.double()[expected]
    worse = (x - far).square().sum(1) - (x - near).square().sum(1)
    terms = x.square().sum(1) + far.square().sum(1)
    assert bool((worse.abs() <= SLACK * terms).all())
    assert float((found == expected).float().mean()) > 0.99


def _chain_equal(vectors: Tensor, codebooks: Tensor) -> None:
    assert triton_twin.refuse_nearest_codes_residual(vectors, codebooks) is None
    codes, left = triton_twin.nearest_codes_residual(vectors, codebooks)
    expected, rest = torch_twin.nearest_codes_residual(vectors, codebooks)
    assert left.dtype == vectors.dtype and torch.equal(codes, expected)
    assert torch.equal(left, rest)  # subtraction alone, in the same order


def _chain(sizes: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype) -> None:
    n_vectors, n_books, n_codes, width = sizes
    vectors = _integers((n_vectors, width), 9, 10).to(device, dtype)
    books = _integers((n_books, n_codes, width), 4, 11).to(device, dtype)
    _chain_equal(vectors, books)


def _nothing(device: torch.device, dtype: torch.dtype) -> None:
    """No vectors, or no codebooks: nothing is launched."""
    codebook = torch.ones(3, 4, dtype=dtype, device=device)
    _equal(torch.ones(0, 4, dtype=dtype, device=device), codebook)
    _chain_equal(torch.ones(0, 4, dtype=dtype, device=device), codebook[None])
    _chain_equal(torch.ones(5, 4, dtype=dtype, device=device), codebook[None][:0])


def _refusals(device: torch.device, dtype: torch.dtype) -> None:
    wide = torch.ones(2, 4, dtype=torch.float64, device=device)
    assert "float64" in str(triton_twin.refuse_nearest_code(wide, wide.to(dtype)))
    assert "float64" in str(triton_twin.refuse_nearest_codes_residual(wide.to(dtype), wide[None]))
    assert "columns" in str(triton_twin.refuse_nearest_code(*[wide.to(dtype)[:, :0]] * 2))


_ONE = (torch.float32,)
_SIZES = [(1, 1, 1), (63, 33, 4), (33, 100, 8), (32, 64, 16), (31, 63, 17), (5, 1023, 33)]
CASES = [Case(f"lookup {n} x {k} x {d}", partial(_sizes, n, k, d)) for n, k, d in _SIZES]
CASES += [
    Case("ties", _ties),
    Case("strides", _strides),
    Case("mixed dtypes", _mixed),
    Case("reals", partial(_reals, 65, 127, 40)),
    Case("chain of 3 x 100 x 8", partial(_chain, (17, 3, 100, 8))),
    Case("chain of 4 x 65 x 33", partial(_chain, (15, 4, 65, 33))),
    Case("chain of 1 x 1 x 1", partial(_chain, (1, 1, 1, 1))),
    Case("nothing", _nothing),
    Case("refusals", _refusals, _ONE),
    Case("lookup of an image", partial(_reals, 4096, 16384, 8), large=True),
    Case("lookup of wide codes", partial(_reals, 1024, 8192, 256), large=True),
    Case("chain of speech", partial(_chain, (1500, 8, 1024, 128)), large=True),
]
