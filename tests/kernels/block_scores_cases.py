"""Block scores: summaries that follow the cache, and products with them.

Tolerances: products of numbers of standard deviation 1 are added up in another order, 256 of them
at most; a mean may round to the number next to it where it is stored in a half type.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mmaccel.kernels.block_scores import Kind, block_scores
from tests.kernels.case import Case, Lane
from tests.kernels.window_attention_cases import Sizes, make

KINDS: tuple[Kind, ...] = ("bounds", "means", "sums", "given")


def _score(
    sizes: Sizes, starts: list[int], size: int, kind: Kind, each: bool, lane: Lane
) -> Tensor:
    """`sizes` is R, Hkv, G, W, S, D; NaN stands behind each row's end. Summaries have one block
    more than there are, side by side, as the executor keeps them.
    """
    q, k, _, start = make(lane, sizes, starts)
    rows, heads, _, _, room, head = sizes
    n_blocks = -(-room // size)
    known = lane.normal(rows, heads, head * (1 + (kind == "bounds")), n_blocks + 1, seed=5)
    summaries = known[..., :n_blocks].mT
    near = 3e-5 if lane.dtype in (torch.float32, torch.float64) else 4 * lane.rounding
    made: Tensor = lane.compare(
        block_scores, q, k, summaries, start, size=size, kind=kind, each=each,
        tolerance={"result": near, "summaries": 0.0 if kind == "bounds" else lane.rounding},
    )  # fmt: skip
    ends = [min(max(first + sizes[3], 0), room) for first in starts]
    for row, end in enumerate(ends):
        assert made[row, ..., -(-end // size) :].isinf().all()
        assert made[row, ..., : -(-end // size)].isfinite().all()
    return made


def _run(sizes: Sizes, starts: list[int], size: int, kind: Kind, each: bool, lane: Lane) -> None:
    _score(sizes, starts, size, kind, each, lane)


_SHAPES: dict[str, tuple[Sizes, list[int], int]] = {
    "one of everything": ((1, 1, 1, 1, 1, 16), [0], 1),
    "windows across blocks, heads of 80": ((2, 2, 2, 9, 200, 80), [131, 15], 4),
    "rows beyond their room, groups of 7": ((2, 1, 7, 3, 100, 64), [97, 99], 16),
    "blocks of 40, cut off": ((2, 2, 1, 1, 130, 64), [128, 39], 40),
}
CASES = [
    Case(f"{name}, {kind}{', every query' * each}", partial(_run, *args, kind, each))
    for name, args in _SHAPES.items()
    for kind in KINDS
    for each in (False, True)
]
CASES += [
    Case(
        f"32768 positions, {kind}",
        partial(_run, (2, 8, 4, 16, 2**15, 128), [2**15 - 16, 9000], 16, kind, False),
        large=True,
    )
    for kind in KINDS
]
