"""Features of stills; `mmaccel.demo.features` says what for."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

from torch import Tensor, nn

from mmaccel.demo.features import Features
from mmaccel.demo.scenes.data import make_scenes
from mmaccel.demo.scenes.layout import CANVAS

REFERENCE_SEED = 7  # of no other collection: no model was trained on its images


class SceneFeatures(Features):
    """Four convolutions, the last three strided."""

    folder, width, batch = "scenes-features", 64, 100
    shape = (3, CANVAS, CANVAS)

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.PixelUnshuffle(2)]
        for before, after in pairwise((12, 24, 32, 48, 64)):  # channels, of squares of 2x2 pixels
            stride = 1 if before == 12 else 2
            layers += [nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.SiLU()]
        self.trunk = nn.Sequential(*layers, nn.Flatten(), nn.Linear(CANVAS * 16, self.width))

    def raw(self, items: Tensor) -> Tensor:
        """Of images in 0..1."""
        found: Tensor = self.trunk(2 * items - 1)
        return found


load_features = cache(SceneFeatures.load)


def extract_features(images: Tensor) -> Tensor:
    """Features `[N, 64]` of images `[N, 3, 64, 64]` uint8, or float in 0..1."""
    return load_features().extract(images)


def draw_reference(count: int) -> Tensor:
    """Images `[count, 3, 64, 64]` uint8 that no training saw, to measure distances from."""
    return make_scenes(REFERENCE_SEED, range(count))[2]
