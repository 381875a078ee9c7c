"""The animated picture of the README: a frame a forward pass, of two real runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from scripts import window_gif


def test_a_panel_shows_known_cells_new_ones_bright_and_the_rest_grey() -> None:
    image = Image.new("RGB", (4, 4), (10, 20, 30))
    panel = np.asarray(window_gif.draw_panel(image, (2, 2), before=1, now=2))
    half = window_gif.SIDE // 2
    assert (panel[:half, :half] == (10, 20, 30)).all()
    assert (panel[:half, half:] > (10, 20, 30)).all() and (panel[:half, half:] < 200).any()
    assert (panel[half:] == window_gif.UNKNOWN).all()


def test_frames_are_passes_and_both_sides_end_alike(tmp_path: Path) -> None:
    out = tmp_path / "window.gif"
    window_gif.main(["--out", str(out), "--prompt", "a green triangle", "--seed", "3"])
    with Image.open(out) as gif:
        assert gif.n_frames == 257
        gif.seek(20)
        middle = np.asarray(gif.convert("RGB"))
        gif.seek(256)
        last = np.asarray(gif.convert("RGB"))
    side, top = window_gif.SIDE, window_gif.HEAD
    left = (slice(top, top + side), slice(window_gif.MARGIN, window_gif.MARGIN + side))
    right = (left[0], slice(2 * window_gif.MARGIN + side, 2 * (window_gif.MARGIN + side)))
    assert np.array_equal(last[left], last[right])
    grey = [(middle[part] == window_gif.UNKNOWN).all(-1).mean() for part in (left, right)]
    assert grey[0] > 0.9 > 0.8 > grey[1]  # 21 tokens of 256, and several a pass
