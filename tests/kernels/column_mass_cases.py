"""Column mass: the attention that every key receives.

Tolerance: weights are at most 1 and made in float32 from exact products whatever the inputs are;
scores differ by the order of at most 128 sums, masses by that of at most 100 queries.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mmaccel.kernels.column_mass import column_mass
from mmaccel.kernels.window_attention import window_attention
from tests.kernels.case import Case, Lane
from tests.kernels.window_attention_cases import Sizes, make


def _mass(sizes: Sizes, starts: list[int], is_weighted: bool, lane: Lane) -> Tensor:
    q, k, v, start = make(lane, sizes, starts)
    scale = sizes[-1] ** -0.5
    lse = window_attention(q, k, v, start, scale=scale)[1]
    weights = None
    if is_weighted:  # every second column of a table, one query without weight
        table = torch.linspace(0.0, 2.0, 2 * sizes[0] * sizes[3], device=lane.device)
        weights = table.view(sizes[0], sizes[3], 2)[..., 0]
    args, options = (q, k, lse, start), {"scale": scale, "weights": weights}
    mass: Tensor = lane.compare(column_mass, *args, **options, tolerance=4e-6)
    assert torch.equal(mass, lane.call(column_mass, *args, **options))  # the same bits again
    if not is_weighted and min(starts) >= 0:
        queries = torch.full_like(mass[..., 0], sizes[2] * sizes[3])
        torch.testing.assert_close(mass.sum(-1), queries, atol=1e-4, rtol=1e-5)
    return mass


def _shape(sizes: Sizes, starts: list[int], is_weighted: bool, lane: Lane) -> None:
    _mass(sizes, starts, is_weighted, lane)


def _nothing_seen(lane: Lane) -> None:
    mass = _mass((2, 1, 2, 4, 70, 64), [-4, -2], False, lane)
    assert not mass[0].any() and mass[1, :, :2].all() and not mass[1, :, 2:].any()


_SHAPES: dict[str, tuple[Sizes, list[int]]] = {
    "one of everything": ((1, 1, 1, 1, 1, 16), [0]),
    "capacity 63": ((2, 2, 1, 1, 63, 64), [62, 0]),
    "capacity 64": ((2, 1, 4, 5, 64, 64), [59, 31]),
    "capacity 65, heads of 80": ((2, 1, 4, 5, 65, 80), [60, 59]),
    "capacity 100, groups of 7": ((1, 2, 7, 3, 100, 96), [97]),
    "capacity 200, 40 query rows": ((1, 1, 2, 20, 200, 128), [170]),
}
CASES = [Case(name, partial(_shape, *args, False)) for name, args in _SHAPES.items()]
CASES += [
    Case(
        "heads of 256",
        partial(_shape, (1, 1, 2, 5, 70, 256), [65], False),
        (torch.float16, torch.bfloat16),
    ),
    Case("weights", partial(_shape, (2, 2, 3, 11, 130, 64), [0, 119], True)),
    Case("nothing seen", _nothing_seen),
    Case(
        "capacity 32768",
        partial(_shape, (2, 4, 7, 32, 2**15, 128), [2**15 - 32, 9000], False),
        large=True,
    ),
]
