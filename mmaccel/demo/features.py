"""Features of images, clips and speech of the demo models, by small networks trained to name what
is in these items. No distance over them compares with a published one.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import ClassVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mmaccel.catalog import DEMO_WEIGHTS
from mmaccel.demo.moving_scenes.data import N_FRAMES, make_clips
from mmaccel.demo.scenes.data import make_scenes
from mmaccel.demo.scenes.layout import CANVAS
from mmaccel.errors import OptionError, ShapeError
from mmaccel.tokenizers_vq.mel import magnitudes, mel_filters
from mmaccel.tokenizers_vq.speech_codec import Block

RATE = 16_000  # of sound
WINDOW, STEP = 10_240, 5_120  # samples of an item, and from one to the next
_COLUMN = 320  # samples
_BANDS, _DEPTH = 48, 4
_N_FFT = 512
_FLOOR = 1e-2  # added to magnitudes: what is quieter than white noise at -63 dB is silence
_LEARNED = 48  # features of clips
_LEAST = 1e-6  # of a mean square in 0..1 of full range


class Features(nn.Module):
    """A network whose features have mean 0 and deviation 1 over the training items."""

    shape: ClassVar[tuple[int, ...]]  # of an item
    width: ClassVar[int]  # D, how many features
    batch: ClassVar[int]  # items extracted together
    mean: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(self.width, dtype=torch.float32))
        self.register_buffer("scale", torch.ones(self.width, dtype=torch.float32))

    def raw(self, items: Tensor) -> Tensor:
        """Features `[N, D]` before they are made standard, of float items."""
        raise NotImplementedError

    def forward(self, items: Tensor) -> Tensor:
        """Features `[N, D]` float32 of N items, float, or uint8 for 0..1."""
        if items.shape[1:] != self.shape:
            expected = ", ".join(map(str, ("B", *self.shape)))
            raise ShapeError(
                f"items: expected [{expected}], received {list(items.shape)}; these features know "
                "items of this package alone; give an extractor that knows yours"
            )
        whole = items if items.is_floating_point() else items.float() / 255
        return (self.raw(whole) - self.mean) / self.scale

    @torch.no_grad()
    def extract(self, items: Tensor) -> Tensor:
        return torch.cat([self(part) for part in items.split(self.batch)])


class SceneFeatures(Features):
    """Of stills: four convolutions, the last three strided."""

    width, batch = 64, 100
    shape = (3, CANVAS, CANVAS)

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.PixelUnshuffle(2)]
        for before, after in pairwise((12, 24, 32, 48, 64)):  # channels, of squares of 2x2 pixels
            stride = 1 if before == 12 else 2
            layers += [nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.SiLU()]
        self.trunk = nn.Sequential(*layers, nn.Flatten(), nn.Linear(CANVAS * 16, self.width))

    def raw(self, items: Tensor) -> Tensor:
        features: Tensor = self.trunk(2 * items - 1)
        return features


class ClipFeatures(Features):
    """Of clips: three convolutions over frames, rows and columns.

    Two more numbers, since the network has learned to look past noise: how much fine detail frames
    have, how much changes between them. Published FVDs are over another network (T. Unterthiner et
    al., 2018, arXiv 1812.01717).
    """

    width, batch = _LEARNED + 2, 50
    shape = (N_FRAMES, 3, CANVAS, CANVAS)

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after, stride in ((12, 24, 1), (24, 48, 2), (48, 64, 1)):
            conv = nn.Conv3d(before, after, 3, (stride, 2, 2), 1)
            layers += [conv, nn.BatchNorm3d(after), nn.SiLU()]
        layers += [nn.Conv3d(64, 32, 1), nn.SiLU(), nn.Flatten()]
        self.trunk = nn.Sequential(*layers, nn.Linear(256 * N_FRAMES, _LEARNED))

    def raw(self, items: Tensor) -> Tensor:
        squares = nn.functional.pixel_unshuffle(2 * items - 1, 2)  # [B, F, 12, 32, 32]
        learned = self.trunk(squares.transpose(1, 2))
        blurred = nn.functional.avg_pool2d(items.flatten(0, 1), 3, 1, 1).view_as(items)
        inside = (items - blurred)[..., 1:-1, 1:-1]  # at the edge a mean has zeros
        detail = inside.square().flatten(1).mean(1)
        change = items.diff(dim=1).square().flatten(1).mean(1)
        return torch.cat([learned, (torch.stack([detail, change], 1) + _LEAST).log()], 1)


class SpeechFeatures(Features):
    """Of speech in -1..1: a small recogniser of phonemes and speakers over a mel spectrogram; the
    mean of its columns over windows of 0.64 s, one every 0.32 s, not over files, as in K. Kilgour
    et al., 2018 (arXiv 1812.08466); published FADs are over VGGish.
    """

    width, batch = 64, 64
    shape = (WINDOW,)
    window: Tensor
    filters: Tensor

    def __init__(self) -> None:
        super().__init__()
        window = torch.hann_window(_N_FFT, dtype=torch.float32)
        self.register_buffer("window", window, persistent=False)
        self.register_buffer("filters", mel_filters(_BANDS, _N_FFT, RATE), persistent=False)
        self.enter = nn.Conv1d(_BANDS, self.width, 4, stride=2, padding=1)
        self.blocks = nn.Sequential(*(Block(self.width, 2 * self.width) for _ in range(_DEPTH)))
        self.norm = nn.LayerNorm(self.width)

    def columns(self, items: Tensor) -> Tensor:
        """A column every 20 ms, `[N, T, 64]`, of sounds of any length."""
        spectrum = magnitudes(items, _N_FFT, _COLUMN // 2, self.window)  # [B, 257, T]
        mel = (self.filters @ spectrum + _FLOOR).log() / 2 + 1
        columns: Tensor = self.norm(self.blocks(self.enter(mel).mT))
        return columns

    def raw(self, items: Tensor) -> Tensor:
        return self.columns(items).mean(1)


_NETWORKS: dict[str, type[Features]] = {
    "scenes": SceneFeatures,
    "moving-scenes": ClipFeatures,
    "voices": SpeechFeatures,
}


@cache
def load_features(name: str) -> Features:
    """The trained network of a demo model's items, in evaluation mode, without training's heads."""
    network = _NETWORKS[name]()
    state = load_file(DEMO_WEIGHTS / f"{name}-features" / "model.safetensors")
    network.load_state_dict({key: state[key] for key in network.state_dict()})
    return network.eval()


def cut_windows(sound: Tensor) -> Tensor:
    """Windows `[N, 10240]` of one sound `[samples]`, without a rest; a shorter sound is padded."""
    if len(sound) < WINDOW:
        sound = nn.functional.pad(sound, (0, WINDOW - len(sound)))
    return sound.unfold(0, WINDOW, STEP)


def hear(sound: Tensor, rate: int = RATE) -> Tensor:
    """Features `[N, 64]` of the windows of one sound `[samples]` in -1..1, of 16 kHz."""
    if rate != RATE:
        raise OptionError(
            f"features: expected sound of {RATE} Hz for voices, received {rate} Hz; resample it, "
            "or give --features module:function"
        )
    return load_features("voices").extract(cut_windows(sound))


def draw_reference(name: str, first: int, count: int) -> Tensor:
    """Images `[count, 3, 64, 64]` or clips `[count, 10, 3, 64, 64]` uint8, of no training."""
    numbers = range(first, first + count)
    return make_scenes(7, numbers)[2] if name == "scenes" else make_clips(25, numbers)[2]
