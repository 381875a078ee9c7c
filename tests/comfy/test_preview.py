"""Previews: what is known, what fills the rest, and what is grey; expected values by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image

from mmaccel.comfy.preview import draw_progress, fill_unknown, known_cells
from mmaccel.tokenizers_vq.grid import Grid

GREY = (128, 128, 128)


class Painter:
    """Token t becomes two by two pixels of red t; remembers what it was asked."""

    def __init__(self, rows: int = 3, width: int = 2, **options: Any) -> None:
        self.layout = Grid(rows, width, 100, **options)
        self.asked: list[Any] = []

    def render(self, tokens: torch.Tensor, captions: Any, seeds: Any) -> list[Image.Image]:
        self.asked.append((tokens.tolist(), list(captions), list(seeds)))
        images = []
        for row in tokens.tolist():
            image = Image.new("RGB", (self.layout.columns, self.layout.rows))
            image.putdata([(t, 0, 0) for t in row])
            images.append(image.resize((2 * self.layout.columns, 2 * self.layout.rows)))
        return images


def window(tokens: list[list[int]], lengths: list[int]) -> Any:
    return SimpleNamespace(tokens=torch.tensor(tokens), lengths=torch.tensor(lengths))


def test_of_a_window_only_whole_rows_are_known() -> None:
    known = known_cells(window([[0] * 6] * 3, [0, 3, 6]), 3, 2)
    assert known.tolist() == [
        [[False, False]] * 3,
        [[True, True], [False, False], [False, False]],
        [[True, True]] * 3,
    ]


def test_of_a_canvas_every_committed_cell_is_known() -> None:
    committed = torch.tensor([[True, False, False, False, True, False]])
    known = known_cells(SimpleNamespace(is_committed=committed), 3, 2)
    assert known.tolist() == [[[True, False], [False, False], [True, False]]]


def test_unknown_cells_repeat_the_nearest_above_or_the_first_known() -> None:
    tokens = torch.tensor([[[5, 99], [99, 7], [99, 99]]])
    known = torch.tensor([[[True, False], [False, True], [False, False]]])
    assert fill_unknown(tokens, known).tolist() == [[[5, 5], [5, 7], [5, 7]]]
    assert tokens.tolist() == [[[5, 99], [99, 7], [99, 99]]]


def test_a_preview_shows_what_is_there_and_grey_below() -> None:
    painter = Painter()
    progress = window([[11, 12, 13, 14, 88, 0], [0] * 6, [21, 22, 23, 0, 0, 0]], [5, 1, 3])
    shown = draw_progress(painter, progress, ["a", "b", "c"], [7, 8, 9])
    assert shown is not None and shown.size == (8, 6)  # the second has no whole row yet
    assert painter.asked == [
        ([[11, 12, 13, 14, 13, 14], [21, 22, 21, 22, 21, 22]], ["a", "c"], [7, 9])
    ]
    at = [[shown.getpixel((x, y)) for x in (0, 2, 4, 6)] for y in (0, 2, 4)]
    assert at[0][0] == (11, 0, 0) and at[0][2] == (21, 0, 0)
    assert at[1][:2] == [(13, 0, 0), (14, 0, 0)] and at[1][2:] == [GREY, GREY]
    assert at[2] == [GREY] * 4


def test_four_images_at_most() -> None:
    painter = Painter()
    progress = window([[k] * 6 for k in range(6)], [6] * 6)
    shown = draw_progress(painter, progress, list("abcdef"), list(range(6)))
    assert shown is not None and shown.size == (16, 6)


def test_nothing_is_drawn_where_there_is_nothing_to_see() -> None:
    progress = window([[1] * 6], [1])
    assert draw_progress(Painter(), progress, ["a"], [0]) is None  # no whole row
    one_line = Painter(rows=1, width=6)
    assert draw_progress(one_line, window([[1] * 6], [6]), ["a"], [0]) is None
    ended = Painter(rows=3, width=2, image_end=9)
    assert draw_progress(ended, window([[1] * 7], [7]), ["a"], [0]) is None
    assert one_line.asked == ended.asked == []


def test_structural_columns_stay_where_they_are() -> None:
    painter = Painter(rows=2, width=2, row_end=50)
    draw_progress(painter, window([[1, 2, 50, 3, 0, 0]], [4]), ["a"], [0])
    assert painter.asked[0][0] == [[1, 2, 50, 1, 2, 50]]
