"""Window attention.

Tolerances, for values of standard deviation 1: the specification computes in float32, which differs
by the order of at most 513 sums; half types round the weights and the result once each, which is
2^-11 or 2^-8 of numbers up to 4.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mmaccel.kernels.window_attention import Blocks, window_attention
from tests.kernels.case import Case, Lane

Sizes = tuple[int, int, int, int, int, int]
_Shapes = dict[str, tuple[Sizes, list[int], int | None]]
TOLERANCE = {torch.float64: 3e-6, torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def make(
    lane: Lane, sizes: Sizes, starts: list[int], value_head: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and a cache laid out `[R, S, H, D]`, NaN after each row's end.

    `sizes` is R, Hkv, G, W, S, D.
    """
    rows, heads, group, width, capacity, head = sizes
    generator = torch.Generator().manual_seed(sum(sizes))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(lane.device, lane.dtype)

    q = draw(rows, width, heads * group, head).transpose(1, 2)
    k, v = draw(rows, capacity, heads, head), draw(rows, capacity, heads, value_head or head)
    for row, start in enumerate(starts):
        k[row, max(start + width, 0) :] = v[row, max(start + width, 0) :] = float("nan")
    start = torch.tensor([[s, -1] for s in starts], device=lane.device)[:, 0]  # every second number
    return q, k.transpose(1, 2), v.transpose(1, 2), start


def compare(lane: Lane, args: tuple[Tensor, ...], **options: Any) -> Tensor:
    """Both results, the log-sum-exp in float32 in any dtype; returns the version's first."""
    options = {"scale": args[0].shape[-1] ** -0.5, **options}
    tolerance = {"result.0": TOLERANCE[lane.dtype], "result.1": 4e-6}
    out: Tensor = lane.compare(window_attention, *args, **options, tolerance=tolerance)[0]
    return out


def _plain(
    sizes: Sizes, starts: list[int], value_head: int | None, lane: Lane, **options: Any
) -> None:
    compare(lane, make(lane, sizes, starts, value_head), **options)


def expect_alike(lane: Lane, what: str, made: list[Tensor]) -> None:
    """Results agree but for the order of sums."""
    tolerance = 1e-6 if lane.dtype == torch.float32 else TOLERANCE[lane.dtype]
    for other in made[1:]:
        lane.expect(what, other, made[0], atol=tolerance, rtol=tolerance)


def _splits(lane: Lane) -> None:
    """1, 2 and 8 splits, of which the last see nothing, agree but for the order of sums."""
    from mmaccel.kernels import window_attention_triton

    args = make(lane, (2, 1, 2, 5, 600, 64), [0, 500])
    made = []
    for splits in (1, 2, 8):
        count = lambda *_, splits=splits: splits  # noqa: E731
        with mock.patch.object(window_attention_triton, "count_splits", count):
            made.append(compare(lane, args))
    expect_alike(lane, "splits", made)


def _alone(ragged: bool, capacity: int, num_splits: int | None, lane: Lane) -> None:
    """One split: a row has the bits alone that it has in a batch, whatever the others hold; where
    it is asked for, a query has them alone, too.
    """
    args = make(lane, (3, 2, 2, 3, capacity, 64), [0, 250, 97])
    options = {"scale": 0.125, "ragged": ragged, "num_splits": num_splits}
    together = lane.call(window_attention, *args, **options)
    for row in range(3):
        alone = lane.call(window_attention, *(each[row : row + 1] for each in args), **options)
        for made, wanted in zip(alone, together, strict=True):
            assert torch.equal(made[0], wanted[row])
    q, k, v, start = args
    for w in range(q.shape[2] if num_splits == 1 else 0):
        alone = lane.call(window_attention, q[:, :, w : w + 1], k, v, start + w, **options)
        for made, wanted in zip(alone, together, strict=True):
            assert torch.equal(made[:, :, 0], wanted[:, :, w])


def _programs(lane: Lane) -> None:
    """Any number of programs shares the keys of ragged rows: the results of one program."""
    from mmaccel.kernels import window_attention_even_triton, window_attention_triton

    args = make(lane, (5, 2, 3, 7, 300, 64), [0, 290, -9, 31, 150])  # 20 units
    made = []
    for programs in (1, 3, 11):
        count = lambda *_, programs=programs: programs  # noqa: E731
        with (
            mock.patch.object(window_attention_triton, "count_programs", count),
            mock.patch.object(window_attention_even_triton, "UNITS", 16),
        ):
            made.append(compare(lane, args, ragged=True))
    expect_alike(lane, "programs", made)


def _nothing_seen(ragged: bool, lane: Lane) -> None:
    """A row that is not there yet, one that has begun in the middle of its window."""
    for capacity in (70, 260):  # one split and two
        args = make(lane, (3, 1, 2, 4, capacity, 64), [-4, -2, 66])
        out = compare(lane, args, ragged=ragged)
        assert not out[0].any() and not out[1, :, :2].any() and out[1, :, 2:].all()


def _sliding(window: int, lane: Lane) -> None:
    compare(lane, make(lane, (2, 1, 2, 9, 200, 64), [0, 150]), window=window)


def _tree(rows: int, lane: Lane) -> None:
    """Bits at random, some above the diagonal; one tree for all rows or one each, transposed."""
    args = make(lane, (2, 1, 3, 13, 150, 64), [0, 130])
    generator = torch.Generator().manual_seed(rows)
    tree = (torch.rand(rows, 13, 13, generator=generator) < 0.4).to(lane.device).transpose(1, 2)
    compare(lane, args, tree=tree if rows > 1 else tree[0])


def _lists(size: int, lane: Lane, capacity: int = 200) -> Blocks:
    """Blocks per head: none, one, skipped entries, and all of them backwards."""
    n_blocks = -(-capacity // size)
    index = torch.full((2, 2, n_blocks), -1, dtype=torch.int32)
    index[0, 1, 0] = 1
    index[1, 0, :4] = torch.tensor([0, -1, n_blocks - 1, 1])
    index[1, 1] = torch.arange(n_blocks).flip(0)
    count = torch.tensor([[0, 1], [4, n_blocks]], dtype=torch.int32)
    return Blocks(index.to(lane.device), count.to(lane.device), size)


def _blocks(size: int, capacity: int, lane: Lane, **options: Any) -> None:
    args = make(lane, (2, 2, 2, 3, capacity, 64), [capacity - 80, capacity - 3])
    out = compare(lane, args, blocks=_lists(size, lane, capacity), **options)
    assert not out[0, :2].any() and out[0, 2:].any()


def _all_at_once(capacity: int, ragged: bool, lane: Lane) -> None:
    args = make(lane, (2, 2, 2, 9, capacity, 80), [120, capacity - 9], 48)
    tree = torch.ones(9, 9, dtype=torch.bool, device=lane.device).tril()
    tree[5, 2] = False
    options = {"tree": tree, "blocks": _lists(48, lane, capacity)}
    compare(lane, args, window=90, softcap=3.0, scale=0.3, ragged=ragged, **options)


_SHAPES: _Shapes = {
    "one of everything": ((1, 1, 1, 1, 1, 16), [0], None),
    "one query, capacity 63": ((2, 2, 1, 1, 63, 64), [62, 0], None),
    "one query, capacity 64": ((2, 1, 4, 1, 64, 64), [63, 31], None),
    "one query, capacity 65": ((2, 1, 4, 1, 65, 64), [64, 63], None),
    "heads of 80, values of 40": ((2, 2, 2, 7, 100, 80), [0, 93], 40),
    "heads of 96, groups of 7": ((2, 1, 7, 3, 130, 96), [125, 60], None),
    "more rows than a tile": ((2, 1, 3, 43, 110, 64), [67, 10], None),
    "a window of 128": ((1, 2, 1, 128, 200, 32), [72], None),
    "capacity 511, splits": ((2, 1, 2, 4, 511, 64), [507, 250], None),
    "capacity 513, splits": ((1, 1, 1, 16, 513, 16), [497], None),
}
_RAGGED: _Shapes = {
    "a long row among short ones": ((4, 2, 1, 1, 700, 64), [3, 699, 40, 0], None),
    "heads of 80, values of 40": ((2, 2, 2, 7, 300, 80), [0, 293], 40),
    "more rows than a tile": ((2, 1, 3, 43, 310, 64), [267, 10], None),
    "a window of 70": ((1, 2, 1, 70, 270, 32), [200], None),
}
_LARGE: _Shapes = {
    "capacity 32768": ((2, 4, 7, 32, 2**15, 128), [2**15 - 32, 9000], None),
    "many heads": ((16, 16, 1, 64, 2048, 64), [100 * row for row in range(16)], None),
}
_LARGE_RAGGED: _Shapes = {
    "one of eight": ((8, 4, 7, 32, 2**15, 128), [2**15 - 32, *range(100, 800, 100)], None),
    "many heads": ((16, 16, 1, 64, 2048, 64), [100 * row for row in range(16)], None),
    "many units": ((5, 90, 1, 1, 300, 16), [299, 5, 100, 0, 150], None),
}
_HALVES = (torch.float16, torch.bfloat16)
CASES = [
    Case(name, partial(_plain, *args), large=large)
    for cases, large in ((_SHAPES, False), (_LARGE, True))
    for name, args in cases.items()
]
CASES += [
    Case("heads of 256 numbers", partial(_plain, (1, 2, 8, 5, 70, 256), [65], None), _HALVES),
    Case("softcap", partial(_plain, (2, 1, 2, 5, 100, 64), [0, 95], None, softcap=0.7)),
    Case("1, 2 and 8 splits", _splits, versions=("triton",)),
    *(
        Case(
            f"ragged: {name}",
            partial(_plain, *args, ragged=True),
            versions=("triton",),
            large=large,
        )
        for cases, large in ((_RAGGED, False), (_LARGE_RAGGED, True))
        for name, args in cases.items()
    ),
    Case("ragged: 1 to 11 programs", _programs, versions=("triton",)),
    *(
        Case(f"ragged: blocks of {n}", partial(_blocks, n, 400, ragged=True), versions=("triton",))
        for n in (1, 48)
    ),
    Case("ragged: nothing seen", partial(_nothing_seen, True), versions=("triton",)),
    Case("ragged: all at once", partial(_all_at_once, 400, True), versions=("triton",)),
    *(
        Case(
            f"a row alone, ragged {ragged}, {name}",
            partial(_alone, ragged, *how),
            versions=("triton",),
        )
        for name, how in {"a short cache": (255, None), "one split": (700, 1)}.items()
        for ragged in (False, True)
    ),
    Case("nothing seen", partial(_nothing_seen, False)),
    *(Case(f"sliding window {n}", partial(_sliding, n)) for n in (1, 64, 65)),
    *(Case(f"trees for {n} rows", partial(_tree, n)) for n in (1, 2)),
    *(Case(f"blocks of {n}", partial(_blocks, n, 200)) for n in (1, 16, 48, 64)),
    Case("all at once", partial(_all_at_once, 200, False)),
]
