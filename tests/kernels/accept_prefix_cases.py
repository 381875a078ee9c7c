"""The end of a pass: every tensor of the rows."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mmaccel.kernels.accept_prefix import RowState, accept_prefix
from tests.kernels.case import ONCE, Case, Lane, poison

_ORIGIN, _LIMIT, _CAPACITY = 3, 20, 6


def _make_state(batch: int, width: int, generator: torch.Generator) -> RowState:
    def draw(*shape: int, most: int) -> Tensor:
        return torch.randint(0, most, shape, generator=generator)

    n_generated = draw(batch, most=_LIMIT + 1)
    n_generated[0] = _LIMIT - 2  # the limit cuts this row
    return RowState(
        draw(batch, _ORIGIN + _LIMIT + width + 2, most=50), n_generated, draw(batch, most=9),
        (n_generated >= _LIMIT) | (draw(batch, most=4) == 3), draw(batch, most=9),
        draw(batch, most=8) == 0,
        draw(batch, most=_CAPACITY + 3), draw(_CAPACITY, batch, most=9),
        torch.rand(batch, dtype=torch.float64, generator=generator),
        poison((4,), torch.int64, torch.device("cpu")),
    )  # fmt: skip


def _rows(
    batch: int, width: int, n_stops: int | None, varies: bool, counts: bool, lane: Lane
) -> None:
    """Rows that stop, that reach their length, that had ended, and scores that are no numbers."""
    generator = torch.Generator().manual_seed(batch + width)
    state = _make_state(batch, width, generator)
    new = torch.randint(0, 12, (batch, width), generator=generator)
    kept = torch.rand(batch, width - 1, generator=generator) < 0.8
    kept[-1:] = True  # the whole window
    peak = torch.randn(batch, width + 2, generator=generator)[:, 1 : width + 1]
    peak[torch.rand(batch, width, generator=generator) < 0.1] = float("nan")
    peak[batch // 2, width // 2] = -float("inf")
    variation = torch.rand(batch, width - 1, generator=generator) if varies else None
    stops = None if n_stops is None else torch.arange(n_stops)
    given = (new, kept, peak, variation, state, torch.tensor(_LIMIT), stops)
    options = {"origin": _ORIGIN, "counts": counts, "tolerance": {"state.spent": 1e-6}}
    lane.compare(accept_prefix, *lane.put(given), **options)


CASES = [
    Case(
        f"{b} rows, {w} slots, {s or 0} stops{', variation' * v}{', counted' * c}",
        partial(_rows, b, w, s, v, c),
        ONCE,
    )
    for b, w, s, v, c in (
        (1, 1, None, False, True), (1, 32, None, False, True), (5, 1, 2, False, True),
        (3, 8, 3, True, True), (7, 33, None, True, True), (4, 16, 1, False, False),
        (70, 40, 1, True, True), (2, 1024, None, False, True), (3, 1100, None, False, True),
    )
]  # fmt: skip
