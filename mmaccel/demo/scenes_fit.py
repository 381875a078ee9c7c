"""Scenes: the shape, size and place that explain a piece of a picture best.

Every shape is laid over the piece at nearby places, radii and turns. Those whose overlap
(intersection over union) comes close to the best are then compared on the picture itself, which is
explained by two colours, one under the shape and one beside it, mixed at the edge: the shape that
leaves the least unexplained (the greatest coefficient of determination) wins. So blurred corners,
which a tokenizer makes, do not turn a star into a circle.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad

from mmaccel.demo.scenes_layout import SHAPES
from mmaccel.demo.scenes_render import shape_depth
from mmaccel.demo.scenes_segment import grow

_HALF = 19  # templates are 39 pixels wide
_SHIFT = 3
_CLOSE = 0.12  # of intersection over union
_RADII = tuple(np.arange(6.0, 15.01, 0.5).tolist())
_TURNS = (-0.11, 0.0, 0.11)
LARGE_FROM = 11.0  # pixels; small objects end at 9.2, large ones begin at 12.9


@dataclass(frozen=True)
class Fit:
    """A shape laid over a piece; `explained` is the share of the variance it explains,
    `overlap` its intersection with the piece over their union, both 0..1; `extent` is the longer
    side of the piece in diameters of the shape.
    """

    shape: str
    x: float
    y: float
    radius: float
    explained: float
    overlap: float
    extent: float

    @property
    def size(self) -> str:
        """`small` or `large`."""
        return "large" if self.radius >= LARGE_FROM else "small"


@lru_cache(maxsize=1)
def _templates() -> tuple[list[tuple[str, float]], Tensor, Tensor]:
    """Labels, hard masks [K, n] and masks with soft edges [K, n]."""
    axis = torch.arange(-_HALF, _HALF + 1, dtype=torch.float32)
    labels, hard, soft = [], [], []
    for shape in SHAPES:
        for radius in _RADII:
            for turn in _TURNS if shape in ("square", "star", "triangle") else (0.0,):
                depth = shape_depth(shape, axis[None, None, :], axis[None, :, None], radius, turn)
                labels.append((shape, radius))
                hard.append((depth > 0).float().flatten())
                cover = (depth + 0.5).clamp(0, 1)
                soft.append(avg_pool2d(cover, 3, stride=1, padding=1).flatten())
    return labels, torch.stack(hard), torch.stack(soft)


def fit_shape(picture: Tensor, mask: np.ndarray, hidden: np.ndarray) -> Fit:
    """Fits a shape to a piece of a picture.

    Args:
        picture: [3, h, w] float in 0..1.
        mask: [h, w] bool, where the piece was found; at least one pixel.
        hidden: [h, w] bool, pixels that show another object; they count neither way.

    Returns:
        The best fit; x and y are pixels from the picture's top left.
    """
    labels, hard, soft = _templates()
    rows, columns = np.nonzero(mask)
    cy = (int(rows.min()) + int(rows.max())) // 2
    cx = (int(columns.min()) + int(columns.max())) // 2
    reach = 0.5 * max(np.ptp(rows), np.ptp(columns)) * 1.2 + 2
    ys, xs = np.ogrid[: mask.shape[0], : mask.shape[1]]
    near = (ys - cy) ** 2 + (xs - cx) ** 2 < reach**2
    free = ~(grow(hidden) & ~grow(mask))
    planes = np.stack([mask, free | mask, free & near]).astype(np.float32)
    layers = torch.cat([torch.from_numpy(planes), picture])
    room = _HALF + _SHIFT
    layers = pad(layers, (room, room, room, room))
    layers = layers[:, cy : cy + 2 * room + 1, cx : cx + 2 * room + 1]
    side = 2 * _HALF + 1
    places = [(oy, ox) for oy in range(2 * _SHIFT + 1) for ox in range(2 * _SHIFT + 1)]
    cuts = torch.stack([layers[:, oy : oy + side, ox : ox + side].flatten(1) for oy, ox in places])
    both, area = cuts[:, 0] @ hard.T, cuts[:, 1] @ hard.T  # [P, K]
    overlap = both / (area + cuts[:, 0].sum(1, keepdim=True) - both)
    best = (-1.0, 0, 0)
    for place, close in enumerate(overlap >= overlap.max() - _CLOSE):
        chosen = close.nonzero()[:, 0]
        if len(chosen):
            explained = _explained(soft[chosen], cuts[place, 2], cuts[place, 3:])
            top = int(explained.argmax())
            if float(explained[top]) > best[0]:
                best = (float(explained[top]), place, int(chosen[top]))
    share, place, top = best
    shape, radius = labels[top]
    oy, ox = places[place]
    x, y = cx + ox - _SHIFT + 0.5, cy + oy - _SHIFT + 0.5
    extent = max(float(np.ptp(rows)), float(np.ptp(columns))) / (2 * radius)
    return Fit(shape, x, y, radius, share, float(overlap[place, top]), extent)


def _explained(masks: Tensor, weight: Tensor, colours: Tensor) -> Tensor:
    """Coefficient of determination of a linear fit in the mask, all channels together.

    Args:
        masks: [K, n].
        weight: [n], 1 where a pixel counts, else 0.
        colours: [3, n].

    Returns:
        [K].
    """
    counted = weight > 0
    m = masks[:, counted]
    x = colours[:, counted]
    m, x = m - m.mean(1, keepdim=True), x - x.mean(1, keepdim=True)
    spread = m.square().sum(1).clamp(min=1e-6)
    return (m @ x.T).square().sum(1) / spread / x.square().sum().clamp(min=1e-6)
