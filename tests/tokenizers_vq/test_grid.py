"""Grids against rasters written by hand."""

from __future__ import annotations

import torch

from mmaccel import Grid


def test_rows_with_ends_and_an_image_end() -> None:
    """Two rows of three: . . . 7 . . . 7 9, then the next image."""
    grid = Grid(rows=2, width=3, vocab_size=10, tokens=(2, 6), row_end=7, image_end=9)
    assert (grid.columns, grid.frame) == (4, 9)
    slots = torch.tensor([list(range(12)), list(range(6, 18))])
    assert grid.forced(slots).tolist() == [
        [-1, -1, -1, 7, -1, -1, -1, 7, 9, -1, -1, -1],
        [-1, 7, 9, -1, -1, -1, 7, -1, -1, -1, 7, 9],
    ]
    assert grid.allowed(slots).tolist() == [v in (2, 3, 4, 5) for v in range(10)]


def test_row_ends_alone() -> None:
    grid = Grid(rows=2, width=1, vocab_size=4, row_end=0)
    assert (grid.columns, grid.frame) == (2, 4)
    assert grid.forced(torch.arange(6)[None]).tolist() == [[-1, 0, -1, 0, -1, 0]]
    assert grid.allowed(torch.arange(6)[None]) is None


def test_image_end_alone() -> None:
    grid = Grid(rows=2, width=2, vocab_size=4, image_end=3)
    assert (grid.columns, grid.frame) == (2, 5)
    assert grid.forced(torch.arange(7)[None]).tolist() == [[-1, -1, -1, -1, 3, -1, -1]]
