"""Window attention in Triton against its specification.

Tolerances, for values of standard deviation 1: float32 differs by the order of at most 1,025 sums;
half types round the weights and the result once each, which is 2^-11 or 2^-8 of numbers up to 4.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mmaccel.kernels import window_attention as specification
from mmaccel.kernels import window_attention_triton as triton_version
from mmaccel.kernels.window_attention import Blocks, Grid
from tests.kernels.case import Case

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def make(
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int, int, int],
    starts: list[int],
    value_head: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and a cache laid out `[R, S, H, D]`, NaN after each row's end.

    `sizes` is R, Hkv, G, W, S, D.
    """
    rows, heads, group, width, capacity, head = sizes
    generator = torch.Generator().manual_seed(sum(sizes))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    q = draw(rows, width, heads * group, head).transpose(1, 2)
    k, v = draw(rows, capacity, heads, head), draw(rows, capacity, heads, value_head or head)
    for row, start in enumerate(starts):
        k[row, max(start + width, 0) :] = v[row, max(start + width, 0) :] = float("nan")
    start = torch.tensor([[s, -1] for s in starts], device=device)[:, 0]  # every second number
    return q, k.transpose(1, 2), v.transpose(1, 2), start


def compare(args: tuple[Tensor, ...], **options: Any) -> Tensor:
    """Both versions, with the log-sum-exp; returns the kernel's result."""
    q = args[0]
    tolerance = TOLERANCE[q.dtype]
    options = {"scale": q.shape[-1] ** -0.5, "lse": True, **options}
    assert triton_version.refuse_window_attention(*args, **options) is None
    expected, expected_lse = specification.window_attention(*args, **options)
    out, lse = triton_version.window_attention(*args, **options)
    assert out.shape == expected.shape and out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, expected_lse, atol=4e-6, rtol=4e-6)  # float32 in any case
    alone = triton_version.window_attention(*args, **{**options, "lse": False})
    assert isinstance(alone, Tensor) and torch.equal(alone, out)
    return out


def _plain(
    sizes: tuple[int, int, int, int, int, int],
    starts: list[int],
    value_head: int | None,
    softcap: float | None,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    compare(make(device, dtype, sizes, starts, value_head), softcap=softcap)


def _splits(device: torch.device, dtype: torch.dtype) -> None:
    """1, 2 and 8 splits, of which the last see nothing, agree but for the order of sums."""
    args = make(device, dtype, (2, 1, 2, 5, 900, 64), [0, 700])
    made = []
    for splits in (1, 2, 8):
        with mock.patch.object(triton_version, "count_splits", lambda *_, splits=splits: splits):
            made.append(compare(args))
    for other in made[1:]:
        tolerance = 1e-6 if dtype == torch.float32 else TOLERANCE[dtype]
        torch.testing.assert_close(other, made[0], atol=tolerance, rtol=tolerance)
    wanted = {  # capacity and programs: what a room of the models in docs/performance.md gets
        (900, 2): 4, (2**15, 2): 32, (4096, 256): 1, (4096, 128): 2, (4096, 64): 4,
        (1024, 32): 8, (300, 8): 2, (255, 8): 1, (4096, 200): 1, (4096, 198): 2,
    }  # fmt: skip
    assert {key: triton_version.count_splits(*key) for key in wanted} == wanted


def _nothing_seen(device: torch.device, dtype: torch.dtype) -> None:
    """A row that is not there yet, one that has begun in the middle of its window."""
    for splits in (1, 4):
        with mock.patch.object(triton_version, "count_splits", lambda *_, splits=splits: splits):
            out = compare(make(device, dtype, (3, 1, 2, 4, 70, 64), [-4, -2, 66]))
        assert not out[0].any() and not out[1, :, :2].any() and out[1, :, 2:].all()


def _sliding(window: int, device: torch.device, dtype: torch.dtype) -> None:
    compare(make(device, dtype, (2, 1, 2, 20, 300, 64), [0, 200]), window=window)


def _tree(rows: int, device: torch.device, dtype: torch.dtype) -> None:
    """Bits at random, some above the diagonal; one tree for all rows or one each, transposed."""
    args = make(device, dtype, (2, 1, 3, 13, 150, 64), [0, 130])
    generator = torch.Generator().manual_seed(rows)
    tree = (torch.rand(rows, 13, 13, generator=generator) < 0.4).to(device).transpose(1, 2)
    out = compare(args, tree=tree if rows > 1 else tree[0])
    assert not out.equal(compare(args))


def _lists(size: int, device: torch.device, dtype: torch.dtype) -> Blocks:
    """Blocks per head: none, one, skipped entries, and all of them backwards."""
    n_blocks = -(-200 // size)
    index = torch.full((2, 2, n_blocks), -1, dtype=torch.int32)
    index[0, 1, 0] = 1
    index[1, 0, :4] = torch.tensor([0, -1, n_blocks - 1, 1])
    index[1, 1] = torch.arange(n_blocks).flip(0)
    count = torch.tensor([[0, 1], [4, n_blocks]], dtype=torch.int32)
    return Blocks(index.to(device), count.to(device), size)


def _blocks(size: int, device: torch.device, dtype: torch.dtype) -> None:
    args = make(device, dtype, (2, 2, 2, 3, 200, 64), [120, 197])
    out = compare(args, blocks=_lists(size, device, dtype))
    assert not out[0, :2].any() and out[0, 2:].any()


def _grid(device: torch.device, dtype: torch.dtype) -> None:
    text = torch.tensor([0, 31], device=device)
    args = make(device, dtype, (2, 1, 2, 18, 220, 64), [60, 202])
    out = compare(args, grid=Grid(text, 12, 2))
    assert not out.equal(compare(args))


def _all_at_once(device: torch.device, dtype: torch.dtype) -> None:
    args = make(device, dtype, (2, 2, 2, 9, 200, 80), [120, 191], 48)
    tree = torch.ones(9, 9, dtype=torch.bool, device=device).tril()
    tree[5, 2] = False
    grid = Grid(torch.tensor([7, 100], device=device), 10, 3)
    blocks = _lists(48, device, dtype)
    compare(args, tree=tree, grid=grid, blocks=blocks, window=90, softcap=3.0, scale=0.3)


def _refusals(device: torch.device, dtype: torch.dtype) -> None:
    q, k, v, start = make(device, dtype, (1, 1, 1, 2, 8, 64), [0])

    def refuse(*args: Tensor) -> str:
        return triton_version.refuse_window_attention(*args, start, scale=1.0) or ""

    assert "float64" in refuse(q.double(), k.double(), v.double())
    assert "heads of 320" in refuse(*(x.repeat(1, 1, 1, 5) for x in (q, k, v)))
    assert "values of 320" in refuse(q, k, v.repeat(1, 1, 1, 5))
    assert "keys whose" in refuse(q, k.mT.contiguous().mT, v)
    assert "values must" in refuse(q, k, v.mT.contiguous().mT)
    assert "empty" in refuse(q, k[:, :, :0], v[:, :, :0])


_SHAPES: dict[str, tuple[tuple[int, int, int, int, int, int], list[int], int | None]] = {
    "one of everything": ((1, 1, 1, 1, 1, 16), [0], None),
    "one query, capacity 63": ((2, 2, 1, 1, 63, 64), [62, 0], None),
    "one query, capacity 64": ((2, 1, 4, 1, 64, 64), [63, 31], None),
    "one query, capacity 65": ((2, 1, 4, 1, 65, 64), [64, 63], None),
    "heads of 80, values of 40": ((2, 2, 2, 7, 100, 80), [0, 93], 40),
    "heads of 96, groups of 7": ((2, 1, 7, 3, 130, 96), [125, 60], None),
    "more rows than a tile": ((2, 1, 3, 43, 110, 64), [67, 10], None),
    "a window of 128": ((1, 2, 1, 128, 200, 32), [72], None),
    "capacity 1023, splits": ((2, 1, 2, 4, 1023, 64), [1019, 500], None),
    "capacity 1025, splits": ((1, 1, 1, 16, 1025, 16), [1009], None),
}
_LARGE: dict[str, tuple[tuple[int, int, int, int, int, int], list[int], int | None]] = {
    "capacity 32768": ((2, 4, 7, 32, 2**15, 128), [2**15 - 32, 9000], None),
    "many heads": ((16, 16, 1, 64, 2048, 64), [100 * row for row in range(16)], None),
}
_HALVES = (torch.float16, torch.bfloat16)
CASES = [
    Case(name, partial(_plain, sizes, starts, value, None))
    for name, (sizes, starts, value) in _SHAPES.items()
]
CASES += [
    Case(name, partial(_plain, sizes, starts, value, None), large=True)
    for name, (sizes, starts, value) in _LARGE.items()
]
CASES += [
    Case("heads of 256 numbers", partial(_plain, (1, 2, 8, 5, 70, 256), [65], None, None), _HALVES),
    Case("softcap", partial(_plain, (2, 1, 2, 5, 100, 64), [0, 95], None, 0.7)),
    Case("1, 2 and 8 splits", _splits),
    Case("nothing seen", _nothing_seen),
    *(Case(f"sliding window {n}", partial(_sliding, n)) for n in (1, 64, 65)),
    *(Case(f"trees for {n} rows", partial(_tree, n)) for n in (1, 2)),
    *(Case(f"blocks of {n}", partial(_blocks, n)) for n in (1, 16, 48, 64)),
    Case("grid", _grid),
    Case("all at once", _all_at_once),
    Case("refusals", _refusals, (torch.float32,)),
]
