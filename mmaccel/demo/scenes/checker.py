"""Scenes: reads an image back against its caption.

Verdicts per image: is the ground the one asked for, is there exactly one object of each colour
asked for and none of another, are shapes, stated sizes and relations right, and is the whole
caption true; what a caption leaves open cannot be wrong. Nothing is learned. In three steps:

1. **Pixels.** A pixel belongs to the prototype (a colour or a ground) it is nearest to after the
   prototype is made lighter or darker within what light, shadow and texture can do. Connected
   pixels of a colour are a piece.
2. **Shapes.** Every shape is laid over a piece at nearby places, radii and turns. Of those whose
   overlap (intersection over union) comes close to the best, the shape wins that leaves the least
   of the image unexplained (the greatest coefficient of determination) by two colours, under it and
   next to it, mixed at the edge: blurred corners do not turn a star into a circle.
3. **Verdicts.** Shapes, sizes and places of the fits are compared with what the caption asks for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad

from mmaccel.demo.scenes.data import Reading, read_caption
from mmaccel.demo.scenes.layout import BACKGROUNDS, COLOURS, SHAPES
from mmaccel.demo.scenes.render import BACKGROUND_RGB, COLOUR_RGB, DEPTH

CORE = 9  # pixels of core an object must have
SURPLUS = 25  # pixels of core that make an object of a piece that nobody asked for
GROUND = 0.8  # share of the pixels outside objects that show the ground asked for
# The next three were set with a margin to what real images show after the tokenizer (500 of them).
_EXPLAINED = 0.1  # of the variance around a piece, by the shape laid over it
_EXTENT = 1.2  # of a piece, in diameters of the shape laid over it
_OVERLAP = {"circle": 0.72, "square": 0.65, "triangle": 0.6, "star": 0.6, "ring": 0.5}
_NEAR = 5.0  # pixels: least distance of two objects whose direction is checked

_HALF = 19  # templates are 39 pixels wide
_SHIFT = 3
_CLOSE = 0.12  # of intersection over union
_RADII = tuple(np.arange(6.0, 15.01, 0.5).tolist())
_TURNS = (-0.11, 0.0, 0.11)
_LARGE_FROM = 11.0  # pixels; small objects end at 9.2, large ones begin at 12.9

NAMES = COLOURS + BACKGROUNDS
_OBJECT_LIGHT = (0.58, 1.25)
_BACKGROUND_LIGHT = {
    "grass": (0.2, 1.9),
    "sand": (0.45, 1.3),
    "water": (0.3, 1.7),
    "snow": (0.45, 1.25),
    "night": (0.2, 2.5),
}


class Judgement:
    """A dataclass of verdicts, all bool."""

    @property
    def whole(self) -> bool:
        return all(vars(self).values())


@dataclass(frozen=True)
class Verdict(Judgement):
    """What is right about one image."""

    background: bool
    colours: bool
    shapes: bool
    sizes: bool
    relations: bool


def check_images(images: Tensor, captions: Sequence[str]) -> list[Verdict]:
    """Judges images [B, 3, 64, 64] float in 0..1 by captions, none of which has a colour twice."""
    verdicts = []
    for image, labels, caption in zip(
        images.float(), classify_pixels(images), captions, strict=True
    ):
        verdicts.append(_judge(image, labels, read_caption(caption)))
    return verdicts


def _judge(image: Tensor, labels: np.ndarray, caption: Reading) -> Verdict:
    background = has_ground(labels, caption.background)
    colours = [o.colour for o in caption.objects]
    pieces = {colour: find_pieces(labels == NAMES.index(colour)) for colour in COLOURS}
    counts = {colour: _count_objects(of_colour) for colour, of_colour in pieces.items()}
    if not all(counts[colour] for colour in colours):
        return Verdict(background, False, False, False, False)
    fits = []
    for colour in colours:
        others = np.isin(labels, [NAMES.index(c) for c in colours if c != colour])
        fits.append(fit_shape(image, pieces[colour][0], others))
    return Verdict(
        background,
        all(counts[colour] == (colour in colours) for colour in COLOURS),
        all(fit.is_shape(o.shape) for fit, o in zip(fits, caption.objects, strict=True)),
        all(o.size in (None, fit.size) for fit, o in zip(fits, caption.objects, strict=True)),
        all(_stands(r, fits[0], fit) for r, fit in zip(caption.relations, fits[1:], strict=True)),
    )


def has_ground(labels: np.ndarray, ground: str | None) -> bool:
    """Whether most pixels [h, w] that show no object show the ground asked for, if any is."""
    if ground is None:
        return True
    is_ground = ~np.isin(labels, [NAMES.index(c) for c in COLOURS])
    return bool((labels == NAMES.index(ground)).sum() / max(is_ground.sum(), 1) >= GROUND)


def _count_objects(pieces: Sequence[np.ndarray]) -> int:
    """How many objects the pieces of a colour are, the largest first."""
    cores = [core_size(piece) for piece in pieces]
    return int(any(core >= CORE for core in cores[:1])) + sum(c >= SURPLUS for c in cores[1:])


def _stands(relation: str, first: Fit, second: Fit) -> bool:
    right = second.x - first.x
    down = second.y - first.y
    if relation == "inside":
        return max(abs(right), abs(down)) < second.radius / 2 and first.radius < second.radius
    if max(abs(right), abs(down)) < _NEAR:
        return False
    if abs(down) > abs(right):
        return relation == ("above" if down > 0 else "below")
    return relation == ("left of" if right > 0 else "right of")


@dataclass(frozen=True)
class Fit:
    """A shape laid over a piece."""

    shape: str
    x: float  # pixels from the image's top left, as `y`
    y: float
    radius: float
    explained: float  # share of the variance that it explains, 0..1
    overlap: float  # its intersection with the piece over their union, 0..1
    extent: float  # the longer side of the piece in diameters of the shape

    @property
    def size(self) -> str:
        return "large" if self.radius >= _LARGE_FROM else "small"

    def is_shape(self, shape: str) -> bool:
        """Whether the piece is that shape: the best fit, and a good one."""
        return (
            self.shape == shape
            and self.overlap >= _OVERLAP[shape]
            and self.explained >= _EXPLAINED
            and self.extent <= _EXTENT
        )


@lru_cache(maxsize=1)
def _templates() -> tuple[list[tuple[str, float]], Tensor, Tensor]:
    """Labels, hard masks [K, n] and masks with soft edges [K, n]."""
    axis = torch.arange(-_HALF, _HALF + 1, dtype=torch.float32)
    dx, dy = axis[None, None, :], axis[None, :, None]
    labels, hard, soft = [], [], []
    for shape in SHAPES:
        for radius in _RADII:
            for turn in _TURNS if shape in ("square", "star", "triangle") else (0.0,):
                u = dx * math.cos(turn) + dy * math.sin(turn)
                v = dy * math.cos(turn) - dx * math.sin(turn)
                depth = DEPTH[shape](u, v, torch.tensor(radius, dtype=torch.float32))
                labels.append((shape, radius))
                hard.append((depth > 0).float().flatten())
                cover = (depth + 0.5).clamp(0, 1)
                soft.append(avg_pool2d(cover, 3, stride=1, padding=1).flatten())
    return labels, torch.stack(hard), torch.stack(soft)


def fit_shape(image: Tensor, mask: np.ndarray, hidden: np.ndarray) -> Fit:
    """The best fit of a shape to a piece of an image [3, h, w] float in 0..1: to a mask [h, w] of
    one pixel at least. Hidden pixels, which show another object, count neither way.
    """
    labels, hard, soft = _templates()
    rows, columns = np.nonzero(mask)
    cy = (int(rows.min()) + int(rows.max())) // 2
    cx = (int(columns.min()) + int(columns.max())) // 2
    reach = 0.5 * max(np.ptp(rows), np.ptp(columns)) * 1.2 + 2
    ys, xs = np.ogrid[: mask.shape[0], : mask.shape[1]]
    near = (ys - cy) ** 2 + (xs - cx) ** 2 < reach**2
    free = ~(_grow(hidden) & ~_grow(mask))
    planes = np.stack([mask, free | mask, free & near]).astype(np.float32)
    margin, side = _HALF + _SHIFT, 2 * _HALF + 1
    layers = pad(torch.cat([torch.from_numpy(planes), image]), (margin,) * 4)
    layers = layers[:, cy : cy + 2 * margin + 1, cx : cx + 2 * margin + 1]
    cuts = layers.unfold(1, side, 1).unfold(2, side, 1)  # [5, places, places, side, side]
    cuts = cuts.permute(1, 2, 0, 3, 4).flatten(3).flatten(0, 1)  # [P, 5, n]
    both, area = cuts[:, 0] @ hard.T, cuts[:, 1] @ hard.T  # [P, K]
    overlap = both / (area + cuts[:, 0].sum(1, keepdim=True) - both)
    best_fits = []  # (share explained, place, template), of each place
    for place, is_close in enumerate(overlap >= overlap.max() - _CLOSE):
        close = is_close.nonzero()[:, 0]
        if len(close):
            explained = _explained(soft[close], cuts[place, 2], cuts[place, 3:])
            best = int(explained.argmax())
            best_fits.append((float(explained[best]), place, int(close[best])))
    share, place, top = max(best_fits, key=lambda fit: fit[0])
    shape, radius = labels[top]
    oy, ox = divmod(place, 2 * _SHIFT + 1)  # of the places, the middle one at (cx, cy)
    x, y = cx + ox - _SHIFT + 0.5, cy + oy - _SHIFT + 0.5
    extent = max(float(np.ptp(rows)), float(np.ptp(columns))) / (2 * radius)
    return Fit(shape, x, y, radius, share, float(overlap[place, top]), extent)


def _explained(masks: Tensor, weight: Tensor, colours: Tensor) -> Tensor:
    """R^2 [K] of linear fits in masks [K, n] of `colours` [3, n], where `weight` [n] is not 0."""
    counted = weight > 0
    m = masks[:, counted]
    x = colours[:, counted]
    m, x = m - m.mean(1, keepdim=True), x - x.mean(1, keepdim=True)
    spread = m.square().sum(1).clamp(min=1e-6)
    return (m @ x.T).square().sum(1) / spread / x.square().sum().clamp(min=1e-6)


def classify_pixels(images: Tensor, names: Sequence[str] = NAMES) -> np.ndarray:
    """Names pixels of images [B, 3, h, w] float in 0..1: [B, h, w] int64, indices into `NAMES`."""
    smooth = avg_pool2d(pad(images.float(), (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    pixel = (0.5 * smooth + 0.5 * images).permute(0, 2, 3, 1)  # [B, h, w, 3]
    distances = []
    for name in names:
        prototype = torch.tensor(COLOUR_RGB.get(name) or BACKGROUND_RGB[name], dtype=torch.float32)
        low, high = _BACKGROUND_LIGHT.get(name, _OBJECT_LIGHT)
        light = ((pixel @ prototype) / prototype.square().sum()).clamp(low, high)
        distances.append((pixel - light[..., None] * prototype).square().sum(-1))
    indices = np.array([NAMES.index(name) for name in names])
    return indices[torch.stack(distances).argmin(0).numpy()]


def find_pieces(mask: np.ndarray) -> list[np.ndarray]:
    """The pieces of a mask [h, w] bool, pixels touching by edges or corners, the largest first."""
    pieces = []
    rest = mask.copy()
    while rest.any():
        piece = np.zeros_like(mask)
        piece[tuple(np.argwhere(rest)[0])] = True
        size = 0
        while piece.sum() > size:
            size = int(piece.sum())
            piece = _grow(piece) & rest
        rest &= ~piece
        pieces.append(piece)
    return sorted(pieces, key=lambda piece: -int(piece.sum()))


def _grow(mask: np.ndarray) -> np.ndarray:
    """The mask and every pixel that touches it, [h, w] bool."""
    wide = np.pad(mask, 1)
    h, w = mask.shape
    return np.any([wide[i : i + h, j : j + w] for i in range(3) for j in range(3)], axis=0)


def core_size(mask: np.ndarray) -> int:
    """Pixels whose four neighbours are in the mask too: a thin seam of mixed colour has none."""
    wide = np.pad(mask, 1)
    core = wide[1:-1, 1:-1] & wide[:-2, 1:-1] & wide[2:, 1:-1] & wide[1:-1, :-2] & wide[1:-1, 2:]
    return int(core.sum())
