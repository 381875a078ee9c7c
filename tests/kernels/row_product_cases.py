"""Products of few rows, with what stands around them.

Tolerance: sums of up to 500 products in another order, whose parts are rounded to the dtype once.
"""

from __future__ import annotations

from functools import partial

import torch

from mmaccel.kernels.norm import Norm
from mmaccel.kernels.row_product import row_product
from tests.kernels.case import Case, Lane

_DTYPES = (torch.float32, torch.bfloat16)


def _shapes(rows: int, depth: int, width: int, lane: Lane) -> None:
    """Alone, behind a norm, under a gate, added, and all of it; of rows that lie in wider ones."""
    x = lane.normal(rows, depth + 3, seed=1, mean=0.2)[:, 2:-1]
    weight, bias = lane.normal(2 * width, depth, seed=2), lane.normal(2 * width, seed=3)
    total = lane.normal(rows, width + 2, seed=4)[:, 1:-1]
    norm = Norm(lane.normal(depth, seed=5), offset=1.0, eps=0.5)
    tolerance = 4 * lane.rounding * depth**0.5
    compare = partial(lane.compare, row_product, x, tolerance=tolerance)
    compare(weight[:width])
    compare(weight[:width], norm=Norm(None))
    compare(weight, bias, norm=norm, gate="silu")
    compare(weight[:width], bias[:width], total=total, scale=0.25)
    compare(weight, bias, norm=norm, gate="gelu_tanh", total=total, same_bits=True)


def _same_bits(lane: Lane) -> None:
    """A row alone, among 16 and among 50 others."""
    x, weight = lane.normal(50, 300, seed=1), lane.normal(90, 300, seed=2)
    norm = Norm(lane.normal(300, seed=3))
    made = lane.call(row_product, x, weight, norm=norm, same_bits=True)
    for rows in (1, 17):
        few = lane.call(row_product, x[:rows], weight, norm=norm, same_bits=True)
        lane.expect(f"{rows} rows", few, made[:rows])


CASES = [
    Case(f"{rows} rows", partial(_shapes, rows, depth, width), _DTYPES)
    for rows, depth, width in ((1, 130, 33), (16, 64, 70), (17, 500, 16), (70, 129, 20))
]
# the interpreter multiplies row by row, so that bits are always the same there
CASES += [Case("the same bits", _same_bits, _DTYPES, large=True, versions=("triton",))]
