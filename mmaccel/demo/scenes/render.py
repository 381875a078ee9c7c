"""Scenes: from a description to pixels.

Shapes are signed distances (antialiased by one pixel), lit from one side, with a cast shadow, a
texture of their own and film grain over everything. A batch is drawn at once; every step is
elementwise, so an image does not depend on its batch. `draw_background` and `paint` serve canvases
of any side (`mmaccel.demo.scenes_vqa` draws larger ones).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from mmaccel.demo.scenes.layout import BACKGROUNDS, CANVAS, SHAPES, TEXTURES, Scene, SceneObject

COLOUR_RGB: dict[str, tuple[float, float, float]] = {
    "red": (0.86, 0.10, 0.12),
    "green": (0.15, 0.80, 0.22),
    "blue": (0.14, 0.26, 0.92),
    "yellow": (0.96, 0.88, 0.14),
    "purple": (0.58, 0.18, 0.76),
    "orange": (0.97, 0.50, 0.08),
    "white": (0.97, 0.97, 0.97),
}
BACKGROUND_RGB: dict[str, tuple[float, float, float]] = {
    "grass": (0.26, 0.38, 0.15),
    "sand": (0.72, 0.62, 0.44),
    "water": (0.16, 0.40, 0.50),
    "snow": (0.66, 0.72, 0.80),
    "night": (0.07, 0.07, 0.15),
}
_SHADOW = 3.0  # pixels


def draw_noise(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The noise of one image: grain [64, 64], middle [32, 32], low [8, 8], normal, float32."""
    return (
        rng.standard_normal((CANVAS, CANVAS), dtype=np.float32),
        rng.standard_normal((32, 32), dtype=np.float32),
        rng.standard_normal((8, 8), dtype=np.float32),
    )


def render(
    scenes: Sequence[Scene], noises: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]
) -> Tensor:
    """Draws a batch of scenes.

    Args:
        scenes: B scenes.
        noises: one `draw_noise` triple per scene.

    Returns:
        Images [B, 3, 64, 64], uint8.
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
    tone = 1 + 0.14 * ((xs - 32) * lx + (ys - 32) * ly) / 32
    image = image * tone[:, None]
    for slot in (2, 1, 0):  # the first object is painted last: it may be inside the second
        rows = [b for b, s in enumerate(scenes) if len(s.objects) > slot]
        if rows:
            r = torch.tensor(rows, dtype=torch.int64)
            image[r], _ = paint(
                image[r],
                [scenes[b].objects[slot] for b in rows],
                xs,
                ys,
                lx[r],
                ly[r],
                speckle[r],
            )
    image = image + (column([s.grain for s in scenes]) * grain)[:, None]
    return (image.clamp(0, 1) * 255).round().to(torch.uint8)


def column(values: Sequence[float]) -> Tensor:
    """Numbers as [B, 1, 1] float32."""
    return torch.tensor(values, dtype=torch.float32)[:, None, None]


def resize(field: Tensor, side: int) -> Tensor:
    """A field [B, h, w] brought to [B, side, side], bilinear."""
    return interpolate(field[:, None], (side, side), mode="bilinear", align_corners=False)[:, 0]


def draw_background(
    scenes: Sequence[Scene], xs: Tensor, ys: Tensor, middle: Tensor, low: Tensor
) -> Tensor:
    """The grounds of scenes.

    Args:
        scenes: B scenes.
        xs, ys: centres of pixels, [1, side] and [side, 1].
        middle: noise [B, 32, 32].
        low: noise, brought to [B, side, side].

    Returns:
        [B, 3, side, side], 0.1 and more.
    """
    side = xs.shape[-1]
    base = torch.tensor([BACKGROUND_RGB[s.background] for s in scenes], dtype=torch.float32)[
        :, :, None, None
    ]
    kind = torch.tensor([BACKGROUNDS.index(s.background) for s in scenes], dtype=torch.int64)
    relief = torch.zeros(len(scenes), side, side, dtype=torch.float32)
    phase = column([s.phase for s in scenes])
    tilt = column([s.tilt for s in scenes])
    for k, name in enumerate(BACKGROUNDS):
        r = (kind == k).nonzero()[:, 0]
        if len(r) == 0:
            continue
        p, t, lo, mid = phase[r], tilt[r], low[r], middle[r]
        if name == "grass":  # blades: fine across, coarse along
            relief[r] = 0.30 * resize(mid[:, :10, :], side) + 0.10 * lo
        elif name == "sand":  # ripples bent by the low noise
            wave = (xs * t.sin() + ys * t.cos()) * 0.75 + p + 1.2 * lo
            relief[r] = 0.085 * wave.sin() + 0.03 * resize(mid, side) + 0.03 * lo
        elif name == "water":  # long waves and glints
            wave = ys * 0.62 + (xs * 0.10) * t.sin() + p + 1.6 * lo
            relief[r] = 0.17 * wave.sin() + 0.12 * resize(mid[:, :, :6], side)
        elif name == "snow":
            relief[r] = 0.06 * lo + 0.04 * resize(mid[:, :16, :16], side)
        else:  # night: a dim glow and stars
            stars = (resize(mid, side) - 1.35).clamp(min=0)
            relief[r] = 0.25 * lo + 5.0 * stars
    strength = column([s.relief for s in scenes])
    return base * (1 + strength * relief)[:, None].clamp(min=0.1)


def paint(
    image: Tensor,
    objects: Sequence[SceneObject],
    xs: Tensor,
    ys: Tensor,
    lx: Tensor,
    ly: Tensor,
    speckle: Tensor,
) -> tuple[Tensor, Tensor]:
    """Paints one object, with its shadow, over each image.

    Args:
        image: [B, 3, side, side].
        objects: B objects.
        xs, ys: centres of pixels, [1, side] and [side, 1].
        lx, ly: direction of the light, [B, 1, 1].
        speckle: noise of speckled objects, [B, side, side].

    Returns:
        The images, and how much of each pixel the object covers, [B, side, side] in 0..1.
    """
    x, y, radius = (column([getattr(o, f) for o in objects]) for f in ("x", "y", "radius"))
    angle = column([o.angle for o in objects])
    kind = torch.tensor([SHAPES.index(o.shape) for o in objects], dtype=torch.int64)
    shadow = _coverage(kind, xs - x + _SHADOW * lx, ys - y + _SHADOW * ly, radius, angle)[0]
    cover, depth = _coverage(kind, xs - x, ys - y, radius, angle)
    colour = torch.tensor([COLOUR_RGB[o.colour] for o in objects], dtype=torch.float32)[
        :, :, None, None
    ]
    texture = torch.tensor([TEXTURES.index(o.texture) for o in objects], dtype=torch.int64)[
        :, None, None
    ]
    phase = column([o.texture_phase for o in objects])
    stripes = 0.08 * ((xs * phase.cos() + ys * phase.sin()) * 1.1 + phase).sin()
    pattern = torch.where(texture == 1, stripes, torch.where(texture == 2, 0.07 * speckle, 0.0))
    shade = 0.92 + 0.20 * ((xs - x) * lx + (ys - y) * ly) / radius + pattern
    shade = torch.where(depth < 1.3, 0.80 * shade, shade)  # a darker rim
    image = image * (1 - 0.42 * shadow)[:, None]
    return image * (1 - cover)[:, None] + colour * (shade * cover)[:, None], cover


def _coverage(
    kind: Tensor, dx: Tensor, dy: Tensor, radius: Tensor, angle: Tensor
) -> tuple[Tensor, Tensor]:
    """Coverage 0..1 and depth under the edge in pixels, both [B, side, side]."""
    c = angle.cos()
    s = angle.sin()
    u = dx * c + dy * s
    v = dy * c - dx * s
    depth = torch.empty_like(u)
    for k, name in enumerate(SHAPES):
        r = (kind == k).nonzero()[:, 0]
        if len(r):
            depth[r] = _DEPTH[name](u[r], v[r], radius[r])
    return (depth + 0.5).clamp(0, 1), depth


def _circle(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    return r - (u * u + v * v).sqrt()


def _ring(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    wide = 0.15 * r + 0.6
    return wide - ((u * u + v * v).sqrt() - (r - wide)).abs()


def _square(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    return 0.88 * r - torch.maximum(u.abs(), v.abs())


def _triangle(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    inner = 0.56 * r
    v = v - 0.22 * r
    side = math.sqrt(3) / 2
    return inner - torch.maximum(v, side * u.abs() - 0.5 * v)


def _star(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    outer, inner = 1.18 * r, 0.46 * r
    turn = math.tau / 5
    theta = torch.remainder(torch.atan2(u, -v) + turn / 2, turn) - turn / 2  # 0 at a tip
    length = (u * u + v * v).sqrt()
    px = length * theta.cos()
    py = length * theta.abs().sin()
    qx = inner * math.cos(turn / 2)
    qy = inner * math.sin(turn / 2)
    ex, ey = qx - outer, qy  # edge from the tip to the notch
    return (py * ex - (px - outer) * ey) / (ex * ex + ey * ey).sqrt()


_DEPTH = {"circle": _circle, "square": _square, "triangle": _triangle, "star": _star, "ring": _ring}


def shape_depth(shape: str, dx: Tensor, dy: Tensor, radius: float, angle: float) -> Tensor:
    """Depth under a shape's edge in pixels, negative outside; `dx`, `dy` from its centre."""
    u = dx * math.cos(angle) + dy * math.sin(angle)
    v = dy * math.cos(angle) - dx * math.sin(angle)
    return _DEPTH[shape](u, v, torch.tensor(radius, dtype=torch.float32))
