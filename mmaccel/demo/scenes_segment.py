"""Scenes: which colour or background each pixel shows, and the connected pieces of a colour.

A pixel belongs to the prototype it is nearest to after the prototype is made lighter or darker
within what light, shadow and texture can do. Nothing is learned, so a verdict can be checked by
hand.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad

from mmaccel.demo.scenes_layout import BACKGROUNDS, COLOURS
from mmaccel.demo.scenes_render import BACKGROUND_RGB, COLOUR_RGB

NAMES = COLOURS + BACKGROUNDS
_OBJECT_LIGHT = (0.58, 1.25)
_BACKGROUND_LIGHT = {
    "grass": (0.2, 1.9),
    "sand": (0.45, 1.3),
    "water": (0.3, 1.7),
    "snow": (0.45, 1.25),
    "night": (0.2, 2.5),
}


def classify_pixels(pictures: Tensor) -> np.ndarray:
    """Names the pixels.

    Args:
        pictures: [B, 3, h, w] float in 0..1.

    Returns:
        [B, h, w] int64, indices into `NAMES`.
    """
    smooth = avg_pool2d(pad(pictures.float(), (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    pixel = (0.5 * smooth + 0.5 * pictures).permute(0, 2, 3, 1)  # [B, h, w, 3]
    distances = []
    for name in NAMES:
        prototype = torch.tensor(COLOUR_RGB.get(name) or BACKGROUND_RGB[name])
        low, high = _BACKGROUND_LIGHT.get(name, _OBJECT_LIGHT)
        light = ((pixel @ prototype) / prototype.square().sum()).clamp(low, high)
        distances.append((pixel - light[..., None] * prototype).square().sum(-1))
    return torch.stack(distances).argmin(0).numpy()


def find_pieces(mask: np.ndarray) -> list[np.ndarray]:
    """The pieces of a mask, pixels touching by edges or corners, the largest first.

    Args:
        mask: [h, w] bool.

    Returns:
        Masks [h, w] bool; none where the mask is empty.
    """
    pieces = []
    rest = mask.copy()
    while rest.any():
        piece = np.zeros_like(mask)
        piece[tuple(np.argwhere(rest)[0])] = True
        size = 0
        while piece.sum() > size:
            size = int(piece.sum())
            piece = grow(piece) & rest
        rest &= ~piece
        pieces.append(piece)
    return sorted(pieces, key=lambda piece: -int(piece.sum()))


def largest_piece(mask: np.ndarray) -> np.ndarray:
    """The largest piece of a mask, [h, w] bool; all False where the mask is empty."""
    return next(iter(find_pieces(mask)), np.zeros_like(mask))


def grow(mask: np.ndarray) -> np.ndarray:
    """The mask and every pixel that touches it, [h, w] bool."""
    wide = np.pad(mask, 1)
    h, w = mask.shape
    return np.any([wide[i : i + h, j : j + w] for i in range(3) for j in range(3)], axis=0)


def core_size(mask: np.ndarray) -> int:
    """Pixels whose four neighbours are in the mask too: a thin seam of mixed colour has none."""
    wide = np.pad(mask, 1)
    core = wide[1:-1, 1:-1] & wide[:-2, 1:-1] & wide[2:, 1:-1] & wide[1:-1, :-2] & wide[1:-1, 2:]
    return int(core.sum())
