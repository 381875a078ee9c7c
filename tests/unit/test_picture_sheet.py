"""Sheets show pictures as they are: nothing stretched, nothing cut, nothing over its neighbour."""

from __future__ import annotations

import pytest
from PIL import Image

from mmaccel.pipelines.comparison import Panel, draw_sheet


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        ((64, 64), (240, 240)),
        ((64, 32), (240, 120)),
        ((20, 60), (80, 240)),
        ((960, 480), (240, 120)),
    ],
)
def test_a_picture_keeps_its_shape(size: tuple[int, int], shown: tuple[int, int]) -> None:
    red = Image.new("RGB", size, (255, 0, 0))
    panels = [Panel(title, "note", [red, red], ["a", "b"], "foot") for title in ("one", "two")]
    sheet = draw_sheet(panels, columns=2, foot="the end")
    is_red = sheet.getchannel("G").point(lambda v: 255 * (v < 5))
    columns = [x for x in range(sheet.width) if is_red.crop((x, 0, x + 1, sheet.height)).getbbox()]
    box = is_red.getbbox()
    assert box is not None and box[3] - box[1] == shown[1]
    assert len(columns) == 4 * shown[0]  # two panels of two, none over another
