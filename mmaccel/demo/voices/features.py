"""Features of speech; `mmaccel.demo.features` says what for.

A small recogniser of phonemes and speakers; the mean of its columns over windows of 0.64 s are 64
numbers, one window every 0.32 s. As in K. Kilgour et al., 2018 (arXiv 1812.08466), the distance is
one of windows, not of files; the features of published FADs are those of VGGish.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from mmaccel.demo.features import Features
from mmaccel.tokenizers_vq.mel import magnitudes, mel_filters
from mmaccel.tokenizers_vq.speech_codec import Block

RATE = 16_000
WINDOW = 10_240  # samples of an item
STEP = 5_120  # samples from one to the next
_COLUMN = 320  # samples
_BANDS, _DEPTH = 48, 4
_N_FFT = 512
_FLOOR = 1e-2  # added to magnitudes: what is quieter than white noise at -63 dB is silence


class SpeechFeatures(Features):
    """Convolutions over a mel spectrogram."""

    folder, width, batch = "voices-features", 64, 64
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

    def raw(self, items: Tensor) -> Tensor:
        """Of windows of sound in -1..1."""
        spectrum = magnitudes(items, _N_FFT, _COLUMN // 2, self.window)  # [B, 257, T]
        mel = (self.filters @ spectrum + _FLOOR).log() / 2 + 1
        found: Tensor = self.norm(self.blocks(self.enter(mel).mT))
        return found.mean(1)


def cut_windows(sound: Tensor) -> Tensor:
    """Windows `[N, 10240]` of one sound `[samples]`; what is left at the end is dropped, and a
    shorter sound is followed by silence.
    """
    if len(sound) < WINDOW:
        sound = nn.functional.pad(sound, (0, WINDOW - len(sound)))
    return sound.unfold(0, WINDOW, STEP)


load_features = cache(SpeechFeatures.load)


def extract_speech_features(sound: Tensor) -> Tensor:
    """Features `[N, 64]` of the windows of one sound `[samples]` in -1..1 at 16 kHz."""
    return load_features().extract(cut_windows(sound))
