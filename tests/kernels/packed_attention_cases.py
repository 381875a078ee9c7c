"""Attention on packed entries; tolerances as in `window_attention_cases`, but that a GPU may round
a code times its step and the sum of that and the least once in half types, and not twice.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmaccel.kernels.packed_attention import packed_attention
from tests.kernels.case import Case, Lane
from tests.kernels.pack_group_cases import make_packed
from tests.kernels.window_attention_cases import TOLERANCE, Sizes, expect_alike

_RESIDUAL = 5  # entries that are as they were at least, and those of a group


def _compare(lane: Lane, args: tuple[Any, ...], **options: Any) -> Tensor:
    options = {"scale": args[0].shape[-1] ** -0.5, **options}
    tolerance = TOLERANCE[lane.dtype]
    total = 4e-6 if lane.dtype in (torch.float32, torch.float64) else tolerance
    out: Tensor = lane.compare(
        packed_attention, *args, **options, tolerance={"result.0": tolerance, "result.1": total}
    )[0]
    return out


def make(
    lane: Lane, sizes: Sizes, starts: list[int], bits: int = 4, value_head: int | None = None,
    n_groups: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Rows of which the first entries are packed as far as they fill groups, and which queries read
    the next group so.

    `sizes` is R, Hkv, G, W, P, D. Groups that no query reads have NaN for scales, and so has the
    ring where nothing was written.
    """
    rows, heads, group, width, size, head = sizes
    count = [max(start - _RESIDUAL, 0) // size * size for start in starts]
    n_groups = n_groups or max(count) // size + 1
    room = size + _RESIDUAL + width
    shape = rows, heads, n_groups * size
    packed = make_packed(
        lane, lane.normal(*shape, head, seed=2), lane.normal(*shape, value_head or head, seed=3),
        size, bits, count,
    )  # fmt: skip
    k = lane.normal(rows, room, heads, head, seed=4).transpose(1, 2)
    v = lane.normal(rows, room, heads, value_head or head, seed=5).transpose(1, 2)
    q = lane.normal(rows, width, heads * group, head, seed=6).transpose(1, 2)
    start = torch.tensor(starts, device=lane.device)
    entry = start[:, None] + torch.arange(width, device=lane.device)
    reads_next = (entry - _RESIDUAL) // size * size > packed.count[:, None]
    for row, first in enumerate(starts):
        read = count[row] // size + int(reads_next[row].any())
        for codes in (packed.keys, packed.values):
            codes.scale[row, :, read:] = codes.least[row, :, read:] = float("nan")
        unwritten = torch.arange(first + width, count[row] + room) % room
        k[row, :, unwritten] = v[row, :, unwritten] = float("nan")
    return q, k, v, start, packed, reads_next


def _plain(
    sizes: Sizes, starts: list[int], bits: int, value_head: int | None, softcap: float | None,
    lane: Lane,
) -> None:  # fmt: skip
    _compare(lane, make(lane, sizes, starts, bits, value_head), softcap=softcap)


def _behind(lane: Lane) -> None:
    """Queries before the boundary and behind it read the next group in different forms."""
    args = make(lane, (2, 1, 2, 6, 8, 16), [18, 28])
    reads_next = args[-1]
    assert reads_next.any() and not reads_next.all()
    out = _compare(lane, args)
    whole = _compare(lane, (*args[:-1], torch.zeros_like(reads_next)))
    is_other = (out != whole).any(3).any(1)  # [R, W]
    assert is_other.equal(reads_next)
    assert _compare(lane, args[:-1]).equal(whole)  # None: nobody reads it


def _splits(lane: Lane) -> None:
    """Any number of splits, of which some see nothing."""
    args = make(lane, (2, 1, 2, 5, 64, 64), [3, 600])
    made = [_compare(lane, args, num_splits=splits) for splits in (1, 2, 8, 40)]
    expect_alike(lane, "splits", made)


_SHAPES: dict[str, tuple[Sizes, list[int], int, int | None]] = {
    "nothing packed": ((2, 1, 1, 1, 8, 16), [0, 12], 4, None),
    "one query": ((3, 2, 4, 1, 64, 64), [70, 400, 5], 4, None),
    "one query, 8 bits": ((2, 2, 1, 1, 64, 64), [200, 133], 8, None),
    "a window, heads of 80, values of 40": ((2, 2, 2, 4, 34, 80), [101, 70], 4, 40),
    "narrow groups": ((2, 1, 7, 5, 6, 96), [47, 30], 8, None),
    "more rows than a tile": ((2, 1, 3, 43, 48, 64), [67, 110], 4, None),
    "a window of 64": ((1, 2, 1, 64, 64, 32), [130], 4, None),
}
_HALVES = (torch.float16, torch.bfloat16)
_LARGE: Sizes = (8, 8, 4, 1, 64, 128)
CASES = [Case(name, partial(_plain, *args, None)) for name, args in _SHAPES.items()]
CASES += [
    Case("heads of 256", partial(_plain, (1, 2, 8, 5, 8, 256), [65], 4, None, None), _HALVES),
    Case("softcap", partial(_plain, (2, 1, 2, 5, 16, 64), [20, 95], 4, None, 0.7)),
    Case("across a boundary", _behind),
    Case("1 to 40 splits", _splits),
    Case(
        "32768 positions",
        partial(_plain, _LARGE, [2**15 - 90 * row for row in range(8)], 4, None, None),
        large=True,
    ),
]
