"""Scenes: features of images, by a small network that recognises what is in them.

A Fréchet or kernel distance needs an extractor that knows its images. This one was trained to
name ground, colours, shapes, sizes and places (`scripts.training.scenes_features`); what its heads
read are 64 numbers an image. It knows scenes alone: distances of other images mean nothing.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from mmaccel.demo.features import Features, read_features
from mmaccel.demo.scenes.data import make_scenes
from mmaccel.demo.scenes.layout import BACKGROUNDS, CANVAS, COLOURS, SHAPES, SIZES
from mmaccel.errors import ShapeError

FOLDER = Path(__file__).parents[1] / "weights" / "scenes-features"
WIDTH = 64
REFERENCE_SEED = 7  # of no other collection: no model was trained on its images
_CHANNELS = (12, 24, 32, 48, 64)  # of squares of 2x2 pixels, then of each convolution
_MIXED = 128
_BATCH = 100


class SceneFeatures(Features):
    """Four convolutions, the last three strided, 64 features, and heads that name what is in an
    image.
    """

    def __init__(self) -> None:
        super().__init__(WIDTH)
        layers: list[nn.Module] = [nn.PixelUnshuffle(2)]
        for k, (before, after) in enumerate(zip(_CHANNELS, _CHANNELS[1:])):
            stride = 2 if k else 1
            layers += [nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.SiLU()]
        side = CANVAS // 2 ** (len(_CHANNELS) - 1)
        self.trunk = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * side * side, WIDTH))
        self.mix = nn.Linear(WIDTH, _MIXED)
        n = len(COLOURS)
        self.ground = nn.Linear(_MIXED, len(BACKGROUNDS))
        self.shapes = nn.Linear(_MIXED, n * (len(SHAPES) + 1))
        self.sizes = nn.Linear(_MIXED, n * len(SIZES))
        self.places = nn.Linear(_MIXED, n * 2)

    def raw(self, items: Tensor) -> Tensor:
        """Images `[B, 3, 64, 64]` uint8, or float in 0..1, to `[B, 64]` float32.

        Raises:
            ShapeError: images of another size.
        """
        if items.shape[1:] != (3, CANVAS, CANVAS):
            raise ShapeError(
                f"images: expected [B, 3, {CANVAS}, {CANVAS}], received {list(items.shape)}; "
                "these features are of scenes; give an extractor that knows your images"
            )
        whole = items if items.is_floating_point() else items.float() / 255
        found: Tensor = self.trunk(2 * whole - 1)
        return found

    def read(self, features: Tensor) -> dict[str, Tensor]:
        """What the heads say of features `[B, 64]`: `ground` `[B, 5]`, `shapes` `[B, 7, 6]` (the
        last: no object of this colour) and `sizes` `[B, 7, 2]`, all scores; `places` `[B, 7, 2]`,
        x and y in canvases from the middle.
        """
        raw = self.restore(features)
        seen = nn.functional.silu(self.mix(nn.functional.silu(raw)))
        n = len(COLOURS)
        return {
            "ground": self.ground(seen),
            "shapes": self.shapes(seen).unflatten(1, (n, -1)),
            "sizes": self.sizes(seen).unflatten(1, (n, -1)),
            "places": self.places(seen).unflatten(1, (n, -1)),
        }


@cache
def load_features(folder: Path = FOLDER) -> SceneFeatures:
    """The trained network, float32, in evaluation mode."""
    model = SceneFeatures()
    read_features(model, folder)
    return model


@torch.no_grad()
def extract_features(images: Tensor) -> Tensor:
    """Features `[N, 64]` float32 of images `[N, 3, 64, 64]` uint8 or float in 0..1.

    Raises:
        ShapeError: images of another size.
    """
    model = load_features()
    return torch.cat([model(part) for part in images.split(_BATCH)])


def draw_reference(count: int) -> Tensor:
    """Images `[count, 3, 64, 64]` uint8 that no training saw, to measure distances from."""
    return make_scenes(REFERENCE_SEED, range(count))[2]
