"""Sheets of captioned pictures: one panel (a contact sheet) or several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

_SIDE = 240  # pixels a picture is shown at
_GAP, _MARGIN, _BETWEEN = 16, 40, 56
_TITLE, _TEXT = 26, 17  # font sizes
_PAPER, _INK, _SOFT, _LINE = "#fbfaf7", "#1f2328", "#6a6f76", "#d9d6cf"


@dataclass(frozen=True)
class Panel:
    """Pictures under one heading.

    Attributes:
        title: set large above them.
        note: set small below the title.
        images: PIL pictures, all of one size.
        captions: one per picture.
        foot: set below them.
    """

    title: str
    note: str
    images: Sequence[Image]
    captions: Sequence[str]
    foot: str


def draw_sheet(panels: Sequence[Panel], columns: int, foot: str = "") -> Image:
    """Draw panels side by side.

    Args:
        panels: at least one, with equally many pictures each.
        columns: pictures in a row of a panel.
        foot: one line across the bottom.

    Returns:
        An RGB picture.
    """
    from PIL import Image, ImageDraw, ImageFont, ImageOps

    title, text = ImageFont.load_default(_TITLE), ImageFont.load_default(_TEXT)
    wrapped = [_wrap(caption, text) for caption in panels[0].captions]
    columns = max(1, min(columns, len(wrapped)))
    n_lines = max(map(len, wrapped))
    cell = _SIDE + 8 + n_lines * (_TEXT + 5) + _GAP
    rows = -(-len(wrapped) // columns)
    head = _TITLE + _TEXT + 30
    widest = max(text.getlength(line) for panel in panels for line in (panel.note, panel.foot))
    inner = max(columns * _SIDE + (columns - 1) * _GAP, int(widest) + 1)
    width = 2 * _MARGIN + len(panels) * inner + (len(panels) - 1) * _BETWEEN
    height = 2 * _MARGIN + head + rows * cell + _TEXT + 12 + (_TEXT + 36 if foot else 0)
    sheet = Image.new("RGB", (width, height), _PAPER)
    pen = ImageDraw.Draw(sheet)
    for k, panel in enumerate(panels):
        left = _MARGIN + k * (inner + _BETWEEN)
        if k:
            middle = left - _BETWEEN // 2
            bottom = _MARGIN + head + rows * cell + _TEXT + 12
            pen.line([(middle, _MARGIN), (middle, bottom)], fill=_LINE, width=1)
        pen.text((left, _MARGIN - 6), panel.title, fill=_INK, font=title)
        pen.text((left, _MARGIN + _TITLE + 4), panel.note, fill=_SOFT, font=text)
        for i, (image, lines) in enumerate(zip(panel.images, wrapped, strict=True)):
            x = left + (i % columns) * (_SIDE + _GAP)
            y = _MARGIN + head + (i // columns) * cell
            shown = ImageOps.contain(image, (_SIDE, _SIDE), Image.Resampling.BICUBIC)
            sheet.paste(shown, (x + (_SIDE - shown.width) // 2, y + _SIDE - shown.height))
            for j, line in enumerate(lines):
                pen.text((x, y + _SIDE + 6 + j * (_TEXT + 5)), line, fill=_SOFT, font=text)
        pen.text((left, _MARGIN + head + rows * cell), panel.foot, fill=_INK, font=text)
    if foot:
        y = height - _MARGIN - _TEXT - 6
        pen.line([(_MARGIN, y - 16), (width - _MARGIN, y - 16)], fill=_LINE, width=1)
        pen.text((width / 2, y), foot, fill=_INK, font=text, anchor="ma")
    return sheet


def _wrap(caption: str, font: Any) -> list[str]:
    """Break a caption into lines no wider than a picture."""
    lines: list[str] = []
    for word in caption.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(longer) <= _SIDE:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines
