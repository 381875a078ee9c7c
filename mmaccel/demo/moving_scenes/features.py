"""Features of clips; `mmaccel.demo.features` says what for.

The network has learned to look past noise, so that two more numbers are computed: how much fine
detail frames have, and how much changes from frame to frame. The features of published FVDs are
those of another network (T. Unterthiner et al., 2018, arXiv 1812.01717).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from mmaccel.demo.features import Features
from mmaccel.demo.moving_scenes.data import make_clips
from mmaccel.demo.moving_scenes.layout import N_FRAMES
from mmaccel.demo.scenes.layout import CANVAS

LEARNED = 48
REFERENCE_SEED = 25  # of no other collection: no model was trained on its clips
_LEAST = 1e-6  # of a mean square in 0..1 of full range


class ClipFeatures(Features):
    """Three convolutions over frames, rows and columns; 48 features and two that are computed."""

    folder, width, batch = "moving-scenes-features", LEARNED + 2, 50
    shape = (N_FRAMES, 3, CANVAS, CANVAS)

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after, stride in ((12, 24, 1), (24, 48, 2), (48, 64, 1)):
            conv = nn.Conv3d(before, after, 3, (stride, 2, 2), 1)
            layers += [conv, nn.BatchNorm3d(after), nn.SiLU()]
        layers += [nn.Conv3d(64, 32, 1), nn.SiLU(), nn.Flatten()]
        self.trunk = nn.Sequential(*layers, nn.Linear(256 * N_FRAMES, LEARNED))

    def raw(self, items: Tensor) -> Tensor:
        """Of clips in 0..1."""
        squares = nn.functional.pixel_unshuffle(2 * items - 1, 2)  # [B, F, 12, 32, 32]
        learned = self.trunk(squares.transpose(1, 2))
        blurred = nn.functional.avg_pool2d(items.flatten(0, 1), 3, 1, 1).view_as(items)
        inside = (items - blurred)[..., 1:-1, 1:-1]  # at the edge a mean has zeros
        detail = inside.square().flatten(1).mean(1)
        change = items.diff(dim=1).square().flatten(1).mean(1)
        return torch.cat([learned, (torch.stack([detail, change], 1) + _LEAST).log()], 1)


load_features = cache(ClipFeatures.load)


def extract_clip_features(clips: Tensor) -> Tensor:
    """Features `[N, 50]` of clips `[N, 10, 3, 64, 64]` uint8, or float in 0..1."""
    return load_features().extract(clips)


def draw_reference_clips(first: int, count: int) -> Tensor:
    """Clips `first` to `first + count - 1`, `[count, 10, 3, 64, 64]` uint8, of a collection that no
    training saw, to measure distances from."""
    return make_clips(REFERENCE_SEED, range(first, first + count))[2]
