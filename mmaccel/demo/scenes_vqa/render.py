"""Busy scenes: from a description to pixels, and to a map of what stands where.

Grounds and objects are those of `mmaccel.demo.scenes.render`; strokes, dots and signs are added. A
batch is drawn at once; every step is elementwise, so an image does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mmaccel.demo.scenes.render import (
    COLOUR_RGB,
    column,
    draw_background,
    paint,
    resize,
)
from mmaccel.demo.scenes_vqa.layout import CANVAS, SIGN_HEIGHT, SIGN_WIDTH, BusyScene

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


def draw_noise(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The noise of one image: grain [80, 80], middle [32, 32], low [8, 8], normal, float32."""
    return (
        rng.standard_normal((CANVAS, CANVAS), dtype=np.float32),
        rng.standard_normal((32, 32), dtype=np.float32),
        rng.standard_normal((8, 8), dtype=np.float32),
    )


def render(
    scenes: Sequence[BusyScene], noises: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]
) -> tuple[Tensor, Tensor]:
    """Draws a batch of scenes.

    Args:
        scenes: B scenes.
        noises: one `draw_noise` triple per scene.

    Returns:
        Images [B, 3, 80, 80] uint8, and maps [B, 80, 80] uint8 of what each pixel shows: 0 the
        ground, k + 1 object k, `FIRST_SIGN` + k sign k.
    """
    grain, middle, low = (torch.from_numpy(np.stack(f)) for f in zip(*noises, strict=True))
    axis = torch.arange(CANVAS, dtype=torch.float32) + 0.5
    ys = axis[:, None]
    xs = axis[None, :]
    light = column([s.light for s in scenes])
    lx = light.cos()
    ly = light.sin()
    speckle = resize(middle, CANVAS)
    image = draw_background(scenes, xs, ys, middle, resize(low, CANVAS))
    half = CANVAS / 2
    image = image * (1 + 0.14 * ((xs - half) * lx + (ys - half) * ly) / half)[:, None]
    for scene, pixels in zip(scenes, image, strict=True):
        _draw_strokes(scene, pixels)
    shown = torch.zeros(image.shape[0], CANVAS, CANVAS, dtype=torch.uint8)
    for slot in range(max(len(s.things) for s in scenes)):
        rows = [b for b, s in enumerate(scenes) if len(s.things) > slot]
        r = torch.tensor(rows, dtype=torch.int64)
        things = [scenes[b].things[slot] for b in rows]
        image[r], cover = paint(image[r], things, xs, ys, lx[r], ly[r], speckle[r])
        shown[r] = torch.where(cover >= 0.5, torch.tensor(slot + 1, dtype=torch.uint8), shown[r])
    for scene, pixels, named in zip(scenes, image, shown, strict=True):
        _draw_dots(scene, pixels)
        _draw_signs(scene, pixels, named)
    image = image + (column([s.grain for s in scenes]) * grain)[:, None]
    return (image.clamp(0, 1) * 255).round().to(torch.uint8), shown


def _window(x: float, y: float, reach: float) -> tuple[slice, slice, Tensor, Tensor]:
    """Rows and columns within `reach` of a point, and their pixels' distances from it."""
    left = max(int(x - reach), 0)
    right = min(int(x + reach) + 1, CANVAS)
    top = max(int(y - reach), 0)
    bottom = min(int(y + reach) + 1, CANVAS)
    dx = torch.arange(left, right) + 0.5 - x
    dy = torch.arange(top, bottom) + 0.5 - y
    return slice(top, bottom), slice(left, right), dx[None, :], dy[:, None]


def _draw_strokes(scene: BusyScene, pixels: Tensor) -> None:
    for stroke in scene.strokes:
        rows, columns, dx, dy = _window(stroke.x + stroke.dx / 2, stroke.y + stroke.dy / 2, 6)
        length = stroke.dx**2 + stroke.dy**2
        along = ((dx * stroke.dx + dy * stroke.dy) / length).clamp(-0.5, 0.5)
        far = ((dx - along * stroke.dx) ** 2 + (dy - along * stroke.dy) ** 2).sqrt()
        cover = (1.2 - far).clamp(0, 1)
        pixels[:, rows, columns] *= 1 + cover * (stroke.light - 1)


def _draw_dots(scene: BusyScene, pixels: Tensor) -> None:
    for thing in scene.things:
        if thing.dot is None:
            continue
        rows, columns, dx, dy = _window(thing.dot_x, thing.dot_y, DOT_RADIUS + 2)
        depth = DOT_RADIUS - (dx**2 + dy**2).sqrt()
        rim = (depth + 1.5).clamp(0, 1)  # a dark line sets the dot apart
        cover = (depth + 0.5).clamp(0, 1)
        colour = torch.tensor(COLOUR_RGB[thing.dot], dtype=torch.float32)[:, None, None]
        patch = pixels[:, rows, columns] * (1 - 0.6 * rim)
        pixels[:, rows, columns] = patch * (1 - cover) + colour * cover


def _draw_signs(scene: BusyScene, pixels: Tensor, named: Tensor) -> None:
    for k, sign in enumerate(scene.signs):
        rows = slice(sign.y, sign.y + SIGN_HEIGHT)
        columns = slice(sign.x, sign.x + SIGN_WIDTH)
        ink = torch.zeros(SIGN_HEIGHT, SIGN_WIDTH, dtype=torch.float32)
        for place, digit in enumerate(divmod(sign.number, 10)):
            ink[2:9, 2 + 6 * place : 7 + 6 * place] = torch.from_numpy(GLYPHS[digit])
        plate = 0.75 * torch.tensor(COLOUR_RGB[sign.colour], dtype=torch.float32)[:, None, None]
        pixels[:, rows, columns] = plate * (1 - ink) + 0.97 * ink
        named[rows, columns] = FIRST_SIGN + k
