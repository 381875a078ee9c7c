"""Moving scenes: features of clips, by a small network that recognises what happens in them.

A Fréchet video distance needs an extractor that knows its clips. This one was trained to name
ground, colours, shapes, directions, speeds and events and to say where objects begin and end
(`scripts.training.moving_scenes_features`); what its heads read are 48 numbers a clip. It has
learned to look past noise, so that two more numbers are computed: how much fine detail frames have,
and how much changes from frame to frame. It knows moving scenes alone: distances of other clips
mean nothing, and none compares with a published FVD, whose features are those of another network
(T. Unterthiner et al., 2018, arXiv 1812.01717).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from mmaccel.demo.features import Features, read_features
from mmaccel.demo.moving_scenes import caption
from mmaccel.demo.moving_scenes.data import make_clips
from mmaccel.demo.moving_scenes.layout import COLOURS, DIRECTIONS, N_FRAMES, SHAPES, SPEEDS
from mmaccel.demo.scenes.layout import BACKGROUNDS, CANVAS
from mmaccel.errors import ShapeError

FOLDER = Path(__file__).parents[1] / "weights" / "moving-scenes-features"
LEARNED = 48
WIDTH = LEARNED + 2
REFERENCE_SEED = 25  # of no other collection: no model was trained on its clips
EVENTS = ("", *caption.EVENTS)
_MIXED = 128
_LEAST = 1e-6  # of a mean square in 0..1 of full range
_BATCH = 50
_HEADS = {  # answers about the object of each colour
    "shapes": len(SHAPES) + 1,  # the last: no object
    "directions": len(DIRECTIONS) + 1,  # the last: at rest
    "speeds": len(SPEEDS) + 1,  # the last: at rest, or one of two that hit each other
    "events": len(EVENTS),
    "ways": 4,  # x and y in the first frame, and in the last one
}


class ClipFeatures(Features):
    """Three convolutions over frames, rows and columns, 48 features and two that are computed, and
    heads that name what is in a clip.
    """

    def __init__(self) -> None:
        super().__init__(WIDTH)
        layers: list[nn.Module] = []
        strides: tuple[tuple[int, int, int], ...] = ((1, 2, 2), (2, 2, 2), (1, 2, 2))
        channels = (12, 24, 48, 64)  # of squares of 2x2 pixels, then of each convolution
        for before, after, stride in zip(channels, channels[1:], strides, strict=False):
            layers += [nn.Conv3d(before, after, 3, stride, 1), nn.BatchNorm3d(after), nn.SiLU()]
        layers += [nn.Conv3d(channels[-1], 32, 1), nn.SiLU(), nn.Flatten()]
        side = CANVAS // 16
        self.trunk = nn.Sequential(*layers, nn.Linear(32 * N_FRAMES // 2 * side * side, LEARNED))
        self.mix = nn.Linear(LEARNED, _MIXED)
        self.heads = nn.ModuleDict(
            {name: nn.Linear(_MIXED, len(COLOURS) * size) for name, size in _HEADS.items()}
        )
        self.ground = nn.Linear(_MIXED, len(BACKGROUNDS))
        self.hit = nn.Linear(_MIXED, 2)

    def raw(self, items: Tensor) -> Tensor:
        """Clips `[B, 10, 3, 64, 64]` uint8, or float in 0..1, to `[B, 50]` float32.

        Raises:
            ShapeError: clips of another size or length.
        """
        if items.shape[1:] != (N_FRAMES, 3, CANVAS, CANVAS):
            raise ShapeError(
                f"clips: expected [B, {N_FRAMES}, 3, {CANVAS}, {CANVAS}], received "
                f"{list(items.shape)}; these features are of moving scenes; give an extractor that "
                "knows your clips"
            )
        whole = items if items.is_floating_point() else items.float() / 255
        squares = nn.functional.pixel_unshuffle(2 * whole - 1, 2)  # [B, F, 12, 32, 32]
        learned = self.trunk(squares.transpose(1, 2))
        blurred = nn.functional.avg_pool2d(whole.flatten(0, 1), 3, 1, 1).view_as(whole)
        inside = (whole - blurred)[..., 1:-1, 1:-1]  # at the edge a mean has zeros
        detail = inside.square().flatten(1).mean(1)
        change = whole.diff(dim=1).square().flatten(1).mean(1)
        return torch.cat([learned, (torch.stack([detail, change], 1) + _LEAST).log()], 1)

    def read(self, features: Tensor) -> dict[str, Tensor]:
        """What the heads say of features `[B, 50]`: `ground` `[B, 5]` and `hit` `[B, 2]`, and of
        the object of each colour `shapes` `[B, 6, 5]`, `directions` `[B, 6, 5]`, `speeds`
        `[B, 6, 3]` and `events` `[B, 6, 3]`, all scores; `ways` `[B, 6, 4]`, in canvases from the
        middle.
        """
        raw = self.restore(features)[:, :LEARNED]
        seen = nn.functional.silu(self.mix(nn.functional.silu(raw)))
        found = {
            name: head(seen).unflatten(1, (len(COLOURS), -1)) for name, head in self.heads.items()
        }
        return found | {"ground": self.ground(seen), "hit": self.hit(seen)}


@cache
def load_clip_features(folder: Path = FOLDER) -> ClipFeatures:
    """The trained network, float32, in evaluation mode."""
    model = ClipFeatures()
    read_features(model, folder)
    return model


@torch.no_grad()
def extract_clip_features(clips: Tensor) -> Tensor:
    """Features `[N, 50]` float32 of clips `[N, 10, 3, 64, 64]` uint8 or float in 0..1.

    Raises:
        ShapeError: clips of another size or length.
    """
    model = load_clip_features()
    return torch.cat([model(part) for part in clips.split(_BATCH)])


def draw_reference_clips(first: int, count: int) -> Tensor:
    """Clips `first` to `first + count - 1`, `[count, 10, 3, 64, 64]` uint8, of a collection that no
    training saw, to measure distances from."""
    return make_clips(REFERENCE_SEED, range(first, first + count))[2]
