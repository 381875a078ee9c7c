"""Choosing of blocks: the same lists, ties included.

Weights are products of exponentials in another order: where a share ends within that of a block's
weight a list may be one block longer, so that the cases draw scores without such ends.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmaccel.kernels.choose_blocks import choose_blocks
from tests.kernels.case import ONCE, Case, Lane

Sizes = tuple[int, int, int, int, int]


def _choose(
    sizes: Sizes, starts: list[int], size: int, most: int, options: dict[str, Any], spread: float,
    lane: Lane,
) -> None:  # fmt: skip
    """`sizes` is R, H, Q, W, S; without a share there is no Q."""
    rows, heads, queries, width, room = sizes
    n_blocks = -(-room // size)
    shape = (rows, heads, queries, n_blocks) if "p" in options else (rows, heads, n_blocks)
    scores = lane.normal(*shape, spread=spread)
    if options.get("ties"):
        scores = scores.round()
        options = {key: value for key, value in options.items() if key != "ties"}
    start = torch.tensor([[first, -1] for first in starts], device=lane.device)[:, 0]
    left_out = torch.tensor(7, device=lane.device)
    given: dict[str, Any] = {"width": width, "room": room, "size": size, "most": most, **options}
    index, count = lane.compare(choose_blocks, scores, start, left_out, **given)
    for row, first in enumerate(starts):
        for head in range(heads):
            listed = _read(index[row, head], int(count[row, head]))
            end = min(first + width, room)
            own = range(first // size, -(-end // size))
            assert {0, *own} <= set(listed) and max(listed) < -(-end // size)


def _read(index: Tensor, count: int) -> list[int]:
    listed: list[int] = index.tolist()
    assert listed == sorted(listed[:count]) + [-1] * (len(listed) - count)
    return listed[:count]


_TOP: dict[str, tuple[Sizes, list[int], int, int, dict[str, Any], float]] = {
    "one of everything": ((1, 1, 1, 1, 1), [0], 1, 1, {"budget": 0.5}, 1.0),
    "a tenth": ((2, 2, 1, 1, 700), [699, 40], 4, 18, {"budget": 0.1}, 3.0),
    "ties": ((2, 3, 1, 5, 400), [300, 5], 4, 51, {"budget": 0.5, "ties": True}, 1.0),
    "a window wider than the budget": ((1, 2, 1, 33, 160), [127], 4, 10, {"budget": 0.01}, 1.0),
    "beyond the room": ((2, 1, 1, 6, 90), [88, 60], 16, 4, {"budget": 0.5}, 1.0),
    "all": ((1, 2, 1, 1, 64), [63], 4, 16, {"budget": 1.0}, 1.0),
}
_SHARES: dict[str, tuple[Sizes, list[int], int, int, dict[str, Any], float]] = {
    "one query": ((2, 2, 1, 1, 700), [699, 40], 4, 175, {"p": 0.9, "scale": 0.5}, 3.0),
    "ten queries": ((2, 2, 10, 5, 300), [290, 13], 4, 75, {"p": 0.6, "scale": 0.3}, 4.0),
    "a share that the kept have": ((1, 1, 2, 1, 12), [9], 4, 3, {"p": 0.01}, 0.1),
    "nearly all, beyond the room": ((1, 1, 3, 6, 90), [88], 16, 6, {"p": 0.999}, 1.0),
}
CASES = [Case(name, partial(_choose, *args), ONCE) for name, args in (_TOP | _SHARES).items()]
CASES += [
    Case(
        "32768 positions, a tenth",
        partial(
            _choose, (8, 8, 1, 1, 2**15), [2**15 - 1, *range(9, 16)], 16, 205, {"budget": 0.1}, 3.0
        ),
        ONCE,
        large=True,
    ),
    Case(
        "65536 positions, a share",
        partial(_choose, (1, 8, 4, 1, 2**16), [2**16 - 1], 16, 4096, {"p": 0.9}, 9.0),
        ONCE,
        large=True,
    ),
]
