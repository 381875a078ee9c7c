"""Voices: features of speech, by a small recogniser of phonemes and speakers.

A Fréchet audio distance needs an extractor that knows its sound. This one was trained on espeak's
sound, with connectionist temporal classification and the speaker's name
(`scripts.training.voices_features`); the mean of its columns over windows of 0.64 s are 64 numbers,
one window every 0.32 s. As in K. Kilgour et al., 2018 (arXiv 1812.08466), the distance is one of
windows, not of files. It knows these speakers alone: distances of other speech compare folders of
one kind at best, and none compares with a published FAD, whose features are those of VGGish.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from mmaccel.demo.features import Features, read_features
from mmaccel.errors import ShapeError
from mmaccel.tokenizers_vq.mel import magnitudes, mel_filters
from mmaccel.tokenizers_vq.speech_codec import Block

FOLDER = Path(__file__).parents[1] / "weights" / "voices-features"
RATE = 16_000
WIDTH = 64
WINDOW = 10_240  # samples of an item
STEP = 5_120  # samples from one to the next
_COLUMN = 320  # samples of a column
_BANDS, _DEPTH = 48, 4
_N_FFT = 512
_FLOOR = 1e-2  # added to magnitudes: what is quieter than white noise at -63 dB is silence


class SpeechFeatures(Features):
    """Convolutions over a mel spectrogram, 64 features a window, heads of phonemes and speakers.

    Args:
        phones: how many there are; the blank is one more.
        speakers: how many there are.
    """

    window: Tensor
    filters: Tensor

    def __init__(self, phones: int, speakers: int) -> None:
        super().__init__(WIDTH)
        self.register_buffer(
            "window", torch.hann_window(_N_FFT, dtype=torch.float32), persistent=False
        )
        self.register_buffer("filters", mel_filters(_BANDS, _N_FFT, RATE), persistent=False)
        self.enter = nn.Conv1d(_BANDS, WIDTH, 4, stride=2, padding=1)
        self.blocks = nn.Sequential(*(Block(WIDTH, 2 * WIDTH) for _ in range(_DEPTH)))
        self.norm = nn.LayerNorm(WIDTH)
        self.phones = nn.Linear(WIDTH, phones + 1)
        self.speakers = nn.Linear(WIDTH, speakers)

    def columns(self, sound: Tensor) -> Tensor:
        """`[B, samples]` float32 in -1..1 at 16 kHz to `[B, samples / 320, 64]`."""
        spectrum = magnitudes(sound, _N_FFT, _COLUMN // 2, self.window)  # [B, 257, T]
        mel = (self.filters @ spectrum + _FLOOR).log() / 2 + 1
        found: Tensor = self.norm(self.blocks(self.enter(mel).mT))
        return found

    def raw(self, items: Tensor) -> Tensor:
        """Windows `[B, 10240]` to `[B, 64]` float32.

        Raises:
            ShapeError: windows of another length.
        """
        if items.ndim != 2 or items.shape[1] != WINDOW:
            raise ShapeError(
                f"windows: expected [B, {WINDOW}], received {list(items.shape)}; cut sound with "
                "cut_windows"
            )
        return self.columns(items).mean(1)


def cut_windows(sound: Tensor) -> Tensor:
    """Windows `[N, 10240]` of one sound `[samples]`; what is left at the end is dropped, and a
    shorter sound is followed by silence.
    """
    if len(sound) < WINDOW:
        sound = nn.functional.pad(sound, (0, WINDOW - len(sound)))
    return sound.unfold(0, WINDOW, STEP)


@cache
def load_speech_features(folder: Path = FOLDER) -> SpeechFeatures:
    """The trained network, float32, in evaluation mode."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        phones, speakers = (
            file.get_slice(f"{name}.bias").get_shape()[0] for name in ("phones", "speakers")
        )
    model = SpeechFeatures(phones - 1, speakers)
    read_features(model, folder)
    return model


@torch.no_grad()
def extract_speech_features(sound: Tensor) -> Tensor:
    """Features `[N, 64]` float32 of the windows of one sound `[samples]` in -1..1 at 16 kHz."""
    return torch.cat([load_speech_features()(part) for part in cut_windows(sound).split(64)])
