"""Column mass in Triton against its specification.

Tolerance: weights are at most 1 and made in float32 from exact products whatever the inputs are;
scores differ by the order of at most 128 sums, masses by that of at most 100 queries.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mmaccel.kernels import column_mass, column_mass_triton
from mmaccel.kernels.window_attention import window_attention
from tests.kernels.case import Case
from tests.kernels.window_attention_cases import make

Sizes = tuple[int, int, int, int, int, int]


def _compare(
    sizes: Sizes, starts: list[int], is_weighted: bool, device: torch.device, dtype: torch.dtype
) -> Tensor:
    q, k, v, start = make(device, dtype, sizes, starts)
    scale = sizes[-1] ** -0.5
    lse = window_attention(q, k, v, start, scale=scale, lse=True)[1]
    weights = None
    if is_weighted:  # every second column of a table, one query without weight
        table = torch.linspace(0.0, 2.0, 2 * sizes[0] * sizes[3], device=device)
        weights = table.view(sizes[0], sizes[3], 2)[..., 0]
    args, options = (q, k, lse, start), {"scale": scale, "weights": weights}
    assert column_mass_triton.refuse_column_mass(*args, **options) is None  # type: ignore[arg-type]
    expected = column_mass.column_mass(*args, **options)  # type: ignore[arg-type]
    mass = column_mass_triton.column_mass(*args, **options)  # type: ignore[arg-type]
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass, expected, atol=4e-6, rtol=4e-6)
    again = column_mass_triton.column_mass(*args, **options)  # type: ignore[arg-type]
    assert torch.equal(mass, again)
    return mass


def _plain(sizes: Sizes, starts: list[int], device: torch.device, dtype: torch.dtype) -> None:
    mass = _compare(sizes, starts, False, device, dtype)
    queries = torch.full_like(mass[..., 0], sizes[2] * sizes[3])
    torch.testing.assert_close(mass.sum(-1), queries, atol=1e-4, rtol=1e-5)


def _weighted(device: torch.device, dtype: torch.dtype) -> None:
    _compare((2, 2, 3, 11, 130, 64), [0, 119], True, device, dtype)


def _nothing_seen(device: torch.device, dtype: torch.dtype) -> None:
    mass = _compare((2, 1, 2, 4, 70, 64), [-4, -2], False, device, dtype)
    assert not mass[0].any() and mass[1, :, :2].all() and not mass[1, :, 2:].any()


_SHAPES: dict[str, tuple[Sizes, list[int]]] = {
    "one of everything": ((1, 1, 1, 1, 1, 16), [0]),
    "capacity 63": ((2, 2, 1, 1, 63, 64), [62, 0]),
    "capacity 64": ((2, 1, 4, 5, 64, 64), [59, 31]),
    "capacity 65, heads of 80": ((2, 1, 4, 5, 65, 80), [60, 59]),
    "capacity 100, groups of 7": ((1, 2, 7, 3, 100, 96), [97]),
    "capacity 1023, 40 query rows": ((1, 1, 2, 20, 1023, 128), [900]),
}
CASES = [Case(name, partial(_plain, *args)) for name, args in _SHAPES.items()]
CASES += [
    Case("heads of 256", partial(_plain, (1, 1, 2, 5, 70, 256), [65]),
         (torch.float16, torch.bfloat16)),
    Case("weights", _weighted), Case("nothing seen", _nothing_seen), Case("capacity 32768",
    partial(_plain, (2, 4, 7, 32, 2**15, 128), [2**15 - 32, 9000]), large=True),
]  # fmt: skip
