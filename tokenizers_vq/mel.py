"""Mel spectrograms of sound, [B, samples] to one column a hop."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_FLOOR = 1e-5


def mel_filters(bands: int, n_fft: int, rate: int) -> Tensor:
    """Triangles of equal width on the mel scale (2595 log10(1 + f / 700)), from 0 Hz to rate / 2:
    [bands, n_fft / 2 + 1] float32; each sums to one.
    """
    highest = 2595 * math.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, highest, bands + 2, dtype=torch.float64) / 2595) - 1)
    bins = torch.linspace(0, rate / 2, n_fft // 2 + 1, dtype=torch.float64)
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising = (bins - low) / (middle - low)
    falling = (high - bins) / (high - middle)
    filters = torch.minimum(rising, falling).clamp(min=0)
    return (filters / filters.sum(1, keepdim=True).clamp(min=1e-12)).float()


def magnitudes(sound: Tensor, n_fft: int, hop: int, window: Tensor) -> Tensor:
    """Magnitudes [B, n_fft / 2 + 1, samples / hop] of a short-time Fourier transform of [B,
    samples], a column for every whole hop.
    """
    before = (n_fft - hop) // 2
    padded = F.pad(sound[:, None], (before, n_fft - hop - before), mode="reflect")[:, 0]
    spectrum = torch.stft(padded, n_fft, hop, window=window, center=False, return_complex=True)
    return (spectrum.real.square() + spectrum.imag.square() + 1e-10).sqrt()


class LogMel(nn.Module):
    """The logarithm of a mel spectrogram, with `bands` rows and a column every `hop` samples."""

    window: Tensor
    filters: Tensor

    def __init__(self, rate: int, hop: int, n_fft: int = 1024, bands: int = 80) -> None:
        super().__init__()
        self.hop = hop
        self.n_fft = n_fft
        self.register_buffer(
            "window", torch.hann_window(n_fft, dtype=torch.float32), persistent=False
        )
        self.register_buffer("filters", mel_filters(bands, n_fft, rate), persistent=False)

    def forward(self, sound: Tensor) -> Tensor:
        """[B, samples] float32 to [B, bands, samples / hop]."""
        return self.logarithm(magnitudes(sound, self.n_fft, self.hop, self.window))

    def logarithm(self, spectrum: Tensor) -> Tensor:
        """`magnitudes` [B, n_fft / 2 + 1, T] to [B, bands, T]."""
        return (self.filters @ spectrum).clamp(min=_FLOOR).log()
