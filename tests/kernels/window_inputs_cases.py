"""A window's inputs: drafts, tokens, positions and the token buffer."""

from __future__ import annotations

from functools import partial

import torch

from mmaccel.kernels.window_inputs import window_inputs
from tests.kernels.case import ONCE, Case, Lane

_ORIGIN = 3


def _rows(batch: int, branches: int, width: int, proposes: bool, forces: bool, lane: Lane) -> None:
    """Rows that have no token yet, some, and more predictions than the window is wide."""
    generator = torch.Generator().manual_seed(width)

    def draw(*shape: int, most: int = 100) -> torch.Tensor:
        return torch.randint(0, most, shape, generator=generator)

    n_generated = draw(batch, most=9)
    n_generated[0] = 0
    buffer = draw(batch, _ORIGIN + 9 + width + 5)[:, 1:]  # rows further apart than they are long
    filled = _ORIGIN + n_generated + draw(batch, most=width + 2)
    rows = batch * branches
    proposed = draw(batch, width - 1) if proposes else None
    forced = draw(batch, width - 1, most=3) - 1 if forces else None
    given = (buffer, n_generated, filled, draw(rows, 1), 1 + draw(rows, most=7), proposed, forced)
    lane.compare(window_inputs, *lane.put(given), origin=_ORIGIN, width=width)


CASES = [
    Case(
        f"{b} rows of {g} branches, {w} slots{', drafts' * p}{', forced' * f}",
        partial(_rows, b, g, w, p, f),
        ONCE,
    )
    for b, g in ((1, 1), (3, 2))
    for w, p, f in ((1, False, False), (1, True, False), (5, False, False), (32, True, False),
                    (33, True, True))
]  # fmt: skip
