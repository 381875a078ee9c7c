"""Busy scenes as images of 80x80 pixels, and as maps of what each pixel shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mmaccel.demo.scenes.layout import Thing
from mmaccel.demo.scenes.render import COLOUR_RGB, Noise, Picture
from mmaccel.demo.scenes_vqa.layout import (
    CANVAS,
    SIGN_HEIGHT,
    SIGN_WIDTH,
    BusyScene,
    Sign,
    Stroke,
)

DOT_RADIUS = 2.2
FIRST_SIGN = 8  # in the map: 0 is ground, 1..7 the objects, then the signs
_DIGITS = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
GLYPHS = np.array([[list(map(int, row)) for row in d.split()] for d in _DIGITS], dtype=np.float32)


def render(scenes: Sequence[BusyScene], noises: Sequence[Noise]) -> tuple[Tensor, Tensor]:
    """Draws B scenes.

    Returns:
        Images [B, 3, 80, 80] uint8, and maps [B, 80, 80] uint8 of what each pixel shows: 0 the
        ground, k + 1 object k, `FIRST_SIGN` + k sign k.
    """
    picture = Picture(scenes, noises)
    images = picture.frames[:, 0]
    for scene, image in zip(scenes, images, strict=True):
        for stroke in scene.strokes:
            _draw_stroke(stroke, image)
    shown = torch.zeros(len(scenes), CANVAS, CANVAS, dtype=torch.uint8)
    for slot in range(max(len(scene.objects) for scene in scenes)):
        painted, cover = picture.paint(slot)
        shown[painted] = shown[painted].masked_fill(cover >= 0.5, slot + 1)
    for scene, image, named in zip(scenes, images, shown, strict=True):
        for thing in scene.objects:
            _draw_dot(thing, image)
        for k, sign in enumerate(scene.signs):
            rows, columns = _draw_sign(sign, image)
            named[rows, columns] = FIRST_SIGN + k
    return picture.develop()[:, 0], shown


def _window(x: float, y: float, reach: float) -> tuple[slice, slice, Tensor, Tensor]:
    """Rows and columns within `reach` of a point, and their pixels' distances from it."""
    left, top = (max(int(v - reach), 0) for v in (x, y))
    right, bottom = (min(int(v + reach) + 1, CANVAS) for v in (x, y))
    dx = torch.arange(left, right) + 0.5 - x
    dy = torch.arange(top, bottom) + 0.5 - y
    return slice(top, bottom), slice(left, right), dx[None, :], dy[:, None]


def _draw_stroke(stroke: Stroke, image: Tensor) -> None:
    rows, columns, dx, dy = _window(stroke.x + stroke.dx / 2, stroke.y + stroke.dy / 2, 6)
    length = stroke.dx**2 + stroke.dy**2
    along = ((dx * stroke.dx + dy * stroke.dy) / length).clamp(-0.5, 0.5)
    far = ((dx - along * stroke.dx) ** 2 + (dy - along * stroke.dy) ** 2).sqrt()
    cover = (1.2 - far).clamp(0, 1)
    image[:, rows, columns] *= 1 + cover * (stroke.light - 1)


def _draw_dot(thing: Thing, image: Tensor) -> None:
    if thing.dot is None:
        return
    rows, columns, dx, dy = _window(thing.dot_x, thing.dot_y, DOT_RADIUS + 2)
    depth = DOT_RADIUS - (dx**2 + dy**2).sqrt()
    rim = (depth + 1.5).clamp(0, 1)  # a dark line sets the dot apart
    cover = (depth + 0.5).clamp(0, 1)
    colour = torch.tensor(COLOUR_RGB[thing.dot], dtype=torch.float32)[:, None, None]
    patch = image[:, rows, columns] * (1 - 0.6 * rim)
    image[:, rows, columns] = patch * (1 - cover) + colour * cover


def _draw_sign(sign: Sign, image: Tensor) -> tuple[slice, slice]:
    """The rows and columns of the sign."""
    rows = slice(sign.y, sign.y + SIGN_HEIGHT)
    columns = slice(sign.x, sign.x + SIGN_WIDTH)
    ink = torch.zeros(SIGN_HEIGHT, SIGN_WIDTH, dtype=torch.float32)
    for place, digit in enumerate(divmod(sign.number, 10)):
        ink[2:9, 2 + 6 * place : 7 + 6 * place] = torch.from_numpy(GLYPHS[digit])
    plate = 0.75 * torch.tensor(COLOUR_RGB[sign.colour], dtype=torch.float32)[:, None, None]
    image[:, rows, columns] = plate * (1 - ink) + 0.97 * ink
    return rows, columns
