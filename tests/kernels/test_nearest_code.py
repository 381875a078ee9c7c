"""Nearest codes: the specification against distances written out, ties, chains, dtypes, errors."""

from __future__ import annotations

import pytest
import torch

from mmaccel.errors import ShapeError
from mmaccel.kernels import nearest_code as module
from mmaccel.kernels.dispatch import decide, run
from mmaccel.kernels.nearest_code import nearest_code, nearest_codes_residual

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def brute_force(vectors: torch.Tensor, codebook: torch.Tensor) -> list[int]:
    """The first least of all squared distances, number by number."""
    codes = codebook.double().tolist()
    found = []
    for x in vectors.double().tolist():
        distances = [sum((a - b) ** 2 for a, b in zip(x, c)) for c in codes]
        found.append(distances.index(min(distances)))
    return found


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("n", "k", "d"), [(1, 1, 1), (7, 63, 3), (20, 100, 5)])
def test_the_least_distance_and_the_lowest_index(
    dtype: torch.dtype, n: int, k: int, d: int
) -> None:
    generator = torch.Generator().manual_seed(n)
    vectors = torch.randint(-3, 4, (n, d), generator=generator).to(dtype)
    codebook = torch.randint(-3, 4, (k, d), generator=generator).to(dtype)
    found = nearest_code(vectors, codebook)
    assert found.dtype == torch.int64 and found.tolist() == brute_force(vectors, codebook)


def test_by_hand() -> None:
    codebook = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [4.0, 0.0]])
    vectors = torch.tensor([[1.0, 1.0], [3.0, 0.0], [2.0, 0.0], [0.0, 9.0], [5.0, -1.0]])
    assert nearest_code(vectors, codebook).tolist() == [0, 1, 0, 2, 1]


def test_half_precision_is_summed_in_float32() -> None:
    """In float16 the norm of the second code overflows, in bfloat16 both scores round to one."""
    codebook = torch.tensor([[300.0, 0.0], [301.0, 0.0]], dtype=torch.float16)
    vectors = torch.tensor([[301.0, 0.0]], dtype=torch.float16)
    assert nearest_code(vectors, codebook).tolist() == [1]
    small = torch.tensor([[1.0, 0.0], [1.0, 2**-6]], dtype=torch.bfloat16)
    assert nearest_code(small[1:], small).tolist() == [1]


def test_rows_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, codebook = torch.randn(23, 4), torch.randn(9, 4)
    whole = nearest_code(vectors, codebook)
    monkeypatch.setattr(module, "ROWS", 5)
    assert torch.equal(nearest_code(vectors, codebook), whole)
    assert nearest_code(vectors[:0], codebook).shape == (0,)


def test_a_chain_by_hand() -> None:
    books = torch.tensor([[[8.0], [0.0]], [[2.0], [1.0]], [[-1.0], [0.5]]])
    codes, left = nearest_codes_residual(torch.tensor([[10.0], [1.0], [9.5]]), books)
    assert codes.tolist() == [[0, 0, 1], [1, 1, 1], [0, 0, 0]]
    assert left.tolist() == [[-0.5], [-0.5], [0.5]]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_chain_is_lookups_one_after_the_other(dtype: torch.dtype) -> None:
    vectors, books = torch.randn(11, 6).to(dtype), torch.randn(4, 30, 6).to(dtype)
    codes, left = nearest_codes_residual(vectors, books)
    rest = vectors.float()
    for stage in range(4):
        assert codes[:, stage].tolist() == brute_force(rest, books[stage])
        rest = rest - books[stage].float()[codes[:, stage]]
    assert left.dtype == dtype and torch.equal(left, rest.to(dtype))


def test_no_codebook_leaves_the_vectors() -> None:
    vectors = torch.randn(3, 2)
    codes, left = nearest_codes_residual(vectors, torch.ones(0, 5, 2))
    assert codes.shape == (3, 0) and torch.equal(left, vectors)


@pytest.mark.parametrize("shape", [(4, 3), (0, 2), (2,), (1, 4, 2)], ids=str)
def test_codebooks_that_do_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="codebook: expected .*, received .*; "):
        nearest_code(torch.ones(5, 2), torch.ones(shape))
    with pytest.raises(ShapeError, match="codebook: expected .*, received .*; "):
        nearest_codes_residual(torch.ones(5, 2), torch.ones(1, *shape))


def test_dispatch_finds_it_and_answers_on_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MMACCEL_KERNELS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    vectors, codebook = torch.randn(4, 3), torch.randn(6, 3)
    assert decide(nearest_code, vectors, codebook).backend == "torch"
    assert torch.equal(run(nearest_code, vectors, codebook), nearest_code(vectors, codebook))
