"""Scenes: from a description to pixels.

Shapes are signed distances (antialiased by one pixel), lit from one side, with a cast shadow and a
texture of their own; every frame has film grain of its own. A batch is drawn at once, on torch's
default device; every step is elementwise, so that no frame depends on its batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from mmaccel.demo.scenes.layout import CANVAS, SHAPES, TEXTURES, Scene, Thing

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

Noise = tuple[np.ndarray, np.ndarray, np.ndarray]


def draw_noise(rng: np.random.Generator, n_frames: int = 1, side: int = CANVAS) -> Noise:
    """Noise of one scene: grain [F, side, side], middle [32, 32], low [8, 8], normal, float32."""
    shapes = ((n_frames, side, side), (32, 32), (8, 8))
    grain, middle, low = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
    return grain, middle, low


def render(scenes: Sequence[Scene], noises: Sequence[Noise]) -> Tensor:
    """Draws B scenes of F frames: [B, F, 3, 64, 64] uint8."""
    picture = Picture(scenes, noises)
    for slot in reversed(range(max(len(scene.objects) for scene in scenes))):
        picture.paint(slot)  # the first object last: it may be inside the second
    return picture.develop()


class Picture:
    """Frames of B scenes while they are drawn, first the ground."""

    def __init__(self, scenes: Sequence[Scene], noises: Sequence[Noise]) -> None:
        self.scenes = scenes
        self.grain, middle, low = (torch.as_tensor(np.stack(n)) for n in zip(*noises, strict=True))
        n_frames, side = self.grain.shape[1:3]
        axis = torch.arange(side, dtype=torch.float32) + 0.5
        self.xs, self.ys = axis[None, :], axis[:, None]
        light = _column([scene.light for scene in scenes])
        self.light = light.cos(), light.sin()
        self.speckle = _resize(middle, side)
        ground = _draw_ground(scenes, self.xs, self.ys, middle, _resize(low, side))
        half = side / 2
        across = (self.xs - half) * self.light[0] + (self.ys - half) * self.light[1]
        ground = ground * (1 + 0.14 * across / half)[:, None]
        # [B, F, 3, side, side], 0..1 and beyond
        self.frames = ground[:, None].repeat(1, n_frames, 1, 1, 1)

    def paint(self, slot: int) -> tuple[Tensor, Tensor]:
        """Paints object number `slot` of all scenes and frames with one, and its shadow: N indices
        of B times F frames, and how much of their pixels it covers, [N, side, side] in 0..1.
        """
        n_frames = self.frames.shape[1]
        numbers, things, places = [], [], []
        for b, scene in enumerate(self.scenes):
            if slot >= len(scene.objects):
                continue
            thing = scene.objects[slot]
            for frame in range(n_frames):
                if thing.seen[frame]:
                    numbers.append(b * n_frames + frame)
                    things.append(thing)
                    places.append(thing.track[frame])
        rows = torch.tensor(numbers, dtype=torch.int64)
        dx = self.xs - _column([x for x, _ in places])
        dy = self.ys - _column([y for _, y in places])
        lx, ly = (way[rows // n_frames] for way in self.light)
        shadow, _ = _cover(things, dx + _SHADOW * lx, dy + _SHADOW * ly)
        cover, depth = _cover(things, dx, dy)
        colour = torch.tensor([COLOUR_RGB[thing.colour] for thing in things], dtype=torch.float32)
        texture = _column([TEXTURES.index(thing.texture) for thing in things])
        phase = _column([thing.texture_phase for thing in things])
        stripes = 0.08 * ((self.xs * phase.cos() + self.ys * phase.sin()) * 1.1 + phase).sin()
        speckles = 0.07 * self.speckle[rows // n_frames]
        pattern = torch.where(texture == 1, stripes, torch.where(texture == 2, speckles, 0.0))
        radius = _column([thing.radius for thing in things])
        shade = 0.92 + 0.20 * (dx * lx + dy * ly) / radius + pattern
        shade = torch.where(depth < 1.3, 0.80 * shade, shade)  # a darker rim
        frames = self.frames.flatten(0, 1)
        below = frames[rows] * (1 - 0.42 * shadow)[:, None]
        frames[rows] = (
            below * (1 - cover)[:, None] + colour[..., None, None] * (shade * cover)[:, None]
        )
        return rows, cover

    def develop(self) -> Tensor:
        """The frames with their grain, [B, F, 3, side, side] uint8."""
        strength = _column([scene.grain for scene in self.scenes])[:, None]
        noisy = self.frames + (strength * self.grain)[:, :, None]
        return (noisy.clamp(0, 1) * 255).round().to(torch.uint8)


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None, None]


def _resize(field: Tensor, side: int) -> Tensor:
    """A field [B, h, w] brought to [B, side, side], bilinear."""
    return interpolate(field[:, None], (side, side), mode="bilinear", align_corners=False)[:, 0]


def _draw_ground(
    scenes: Sequence[Scene], xs: Tensor, ys: Tensor, middle: Tensor, low: Tensor
) -> Tensor:
    """The grounds of scenes, [B, 3, side, side], from noise [B, 32, 32] and [B, side, side]."""
    side = xs.shape[-1]
    base = torch.tensor([BACKGROUND_RGB[s.background] for s in scenes], dtype=torch.float32)
    relief = torch.zeros(len(scenes), side, side, dtype=torch.float32)
    for b, scene in enumerate(scenes):
        phase, tilt = _column([scene.phase]), _column([scene.tilt])
        lo, mid = low[b : b + 1], middle[b : b + 1]
        if scene.background == "grass":  # blades: fine across, coarse along
            pattern = 0.30 * _resize(mid[:, :10, :], side) + 0.10 * lo
        elif scene.background == "sand":  # ripples bent by the low noise
            wave = (xs * tilt.sin() + ys * tilt.cos()) * 0.75 + phase + 1.2 * lo
            pattern = 0.085 * wave.sin() + 0.03 * _resize(mid, side) + 0.03 * lo
        elif scene.background == "water":  # long waves and glints
            wave = ys * 0.62 + (xs * 0.10) * tilt.sin() + phase + 1.6 * lo
            pattern = 0.17 * wave.sin() + 0.12 * _resize(mid[:, :, :6], side)
        elif scene.background == "snow":
            pattern = 0.06 * lo + 0.04 * _resize(mid[:, :16, :16], side)
        else:  # night: a dim glow and stars
            stars = (_resize(mid, side) - 1.35).clamp(min=0)
            pattern = 0.25 * lo + 5.0 * stars
        relief[b] = pattern[0]
    strength = _column([scene.relief for scene in scenes])
    return base[..., None, None] * (1 + strength * relief)[:, None].clamp(min=0.1)


def _cover(things: Sequence[Thing], dx: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Coverage 0..1 and depth under the edge in pixels, [N, side, side], of objects at (0, 0)."""
    radius = _column([thing.radius for thing in things])
    angle = _column([thing.angle for thing in things])
    u = dx * angle.cos() + dy * angle.sin()
    v = dy * angle.cos() - dx * angle.sin()
    depth = torch.empty_like(u)
    for shape in SHAPES:
        rows = [k for k, thing in enumerate(things) if thing.shape == shape]
        if rows:
            depth[rows] = DEPTH[shape](u[rows], v[rows], radius[rows])
    return (depth + 0.5).clamp(0, 1), depth


def _circle(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    return r - (u * u + v * v).sqrt()


def _ring(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    wide = 0.15 * r + 0.6
    return wide - ((u * u + v * v).sqrt() - (r - wide)).abs()


def _square(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    return 0.88 * r - torch.maximum(u.abs(), v.abs())


def _triangle(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    v = v - 0.22 * r
    return 0.56 * r - torch.maximum(v, math.sqrt(3) / 2 * u.abs() - 0.5 * v)


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


# depth under a shape's edge in pixels, negative outside, at (u, v) from its centre, by radius
DEPTH = {"circle": _circle, "square": _square, "triangle": _triangle, "star": _star, "ring": _ring}
