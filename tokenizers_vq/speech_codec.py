"""A small speech codec with two layouts of codes over one encoder and one decoder.

Blocks at frame rate are those of H. Siuzdak, "Vocos: Closing the gap between time-domain and
Fourier-based neural vocoders for high-quality audio synthesis", 2023 (arXiv 2306.00814), section 3.
Codes are by finite scalar quantization (`fsq`): one a frame of 20 ms (`flat`), or several a frame
of 40 ms (`stacked`), each of what those before it left over, by projections of its own as in
R. Kumar et al., "High-Fidelity Audio Compression with Improved RVQGAN", 2023 (arXiv 2306.06546),
section 3.2.

Departures: the encoder reads a mel spectrogram; the decoder writes magnitudes alone, whose phases
are found by the fast Griffin-Lim iteration (`invert`); no adversarial loss; most of the decoder's
blocks run at twice the frame rate.

A folder stores a codec as `codec.json` (`SpeechCodecConfig`) and `codec.safetensors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmaccel.checks import within
from mmaccel.tokenizers_vq.fsq import FiniteScalarQuantizer
from mmaccel.tokenizers_vq.mel import LogMel, magnitudes
from mmaccel.weight_folders import Schema, open_folder, save_folder

_UP = 2  # columns of the decoder's spectrum for one frame of 20 ms
_OVERLAP = 4  # of its windows
_LOUDEST = 6.0  # logarithm of a magnitude
_ITERATIONS, _MOMENTUM = 40, 0.99  # of Griffin-Lim
_PHASE_REACH = 11  # frames of 20 ms, beyond which phases are found alike; see `reach`


class Block(nn.Module):
    """ConvNeXt block over time (Liu et al., 2022, arXiv 2201.03545)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.mix = nn.Conv1d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, inner)
        self.narrow = nn.Linear(inner, width)
        self.scale = nn.Parameter(torch.full((width,), 0.2, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """[B, F, C] to the same shape."""
        mixed = self.mix(x.mT).mT
        return x + self.scale * self.narrow(F.gelu(self.widen(self.norm(mixed))))


class ResidualCodes(nn.Module):
    """Q books of finite scalar quantization, each of the residual of those before it."""

    def __init__(self, width: int, levels: Sequence[int], books: int) -> None:
        super().__init__()
        self.quantizer = FiniteScalarQuantizer(levels)
        dims = len(levels)
        self.inward = nn.ModuleList(nn.Linear(width, dims) for _ in range(books))
        self.outward = nn.ModuleList(nn.Linear(dims, width) for _ in range(books))

    def forward(self, vectors: Tensor, kept: Tensor | None = None) -> Tensor:
        """Quantize vectors [B, F, C] with a straight-through gradient; each row uses `kept` [B]
        books.
        """
        total = torch.zeros_like(vectors)
        for book, (inward, outward) in enumerate(zip(self.inward, self.outward, strict=True)):
            part = outward(self.quantizer(inward(vectors - total)))
            if kept is not None:
                part = part * (kept > book)[:, None, None]
            total = total + part
        return total

    def encode(self, vectors: Tensor) -> Tensor:
        """[B, F, C] to codes [B, F, Q] int64."""
        codes = []
        for inward, outward in zip(self.inward, self.outward, strict=True):
            codes.append(self.quantizer.encode(inward(vectors)))
            vectors = vectors - outward(self.quantizer.decode(codes[-1]))
        return torch.stack(codes, -1)

    def decode(self, codes: Tensor) -> Tensor:
        """Codes [B, F, Q] to [B, F, C]."""
        parts = [
            outward(self.quantizer.decode(codes[..., book]))
            for book, outward in enumerate(self.outward)
        ]
        return torch.stack(parts).sum(0)


@dataclass(frozen=True)
class SpeechCodecConfig:
    """Sizes of a codec; the products of levels are `flat_size` and `book_size`."""

    sample_rate: int = within(16_000, 4000, 96_000)  # Hz
    hop: int = within(320, 16, 4096)  # samples of a frame of the flat layout
    levels: tuple[int, ...] = within((5, 5, 5, 4, 4), 2, 4096)  # of the flat layout
    books: int = within(4, 1, 64)  # Q of the stacked layout, with frames of 2 * hop samples
    book_levels: tuple[int, ...] = within((5, 5, 5, 4), 2, 4096)
    encoder_width: int = within(96, 8, 4096)  # channels; `depth`: blocks
    encoder_depth: int = within(3, 0, 64)
    decoder_width: int = within(128, 8, 4096)  # at frame rate
    decoder_depth: int = within(2, 0, 64)
    fine_depth: int = within(4, 0, 64)  # at twice the frame rate


class SpeechCodec(nn.Module):
    """Encodes sound to codes and decodes them."""

    def __init__(self, config: SpeechCodecConfig) -> None:
        super().__init__()
        self.config = config
        self.sample_rate, self.hop, self.books = config.sample_rate, config.hop, config.books
        self.flat = FiniteScalarQuantizer(config.levels)
        self.flat_size = self.flat.vocab_size
        self.n_fft = config.hop // _UP * _OVERLAP
        self.mel = LogMel(config.sample_rate, config.hop)
        bands = self.mel.filters.shape[0]
        width, wide = config.encoder_width, config.decoder_width
        self.read = nn.Conv1d(bands, width, 3, padding=1)
        self.encoder = nn.Sequential(
            *(Block(width, 3 * width) for _ in range(config.encoder_depth)),
            nn.LayerNorm(width),
        )
        self.to_flat = nn.Linear(width, len(config.levels))
        self.from_flat = nn.Linear(len(config.levels), wide)
        self.to_stacked = nn.Linear(2 * width, width)
        self.stacked = ResidualCodes(width, config.book_levels, config.books)
        self.book_size = self.stacked.quantizer.vocab_size
        self.from_stacked = nn.Linear(width, 2 * wide)
        self.write = nn.Conv1d(wide, wide, 3, padding=1)
        inner = 3 * wide
        self.coarse = nn.Sequential(*(Block(wide, inner) for _ in range(config.decoder_depth)))
        self.up = nn.Linear(wide, _UP * wide)
        self.fine = nn.Sequential(
            *(Block(wide, inner) for _ in range(config.fine_depth)),
            nn.LayerNorm(wide),
        )
        self.head = nn.Linear(wide, self.n_fft // 2 + 1)
        # `reach`: frames of the flat layout before and after one, an even number, beyond which
        # codes change its sound by less than -50 dB of the utterance's power (60 sentences: the
        # worst 20 ms at -54 dB, half of them below -85). Frames are decoded in windows that begin
        # at even frames, where the first phases are the whole's. Three columns to each side are
        # read by a block, one by `write`
        read = 1 + 3 * config.decoder_depth - (-3 * config.fine_depth // _UP)
        self.reach = -(-(read + _PHASE_REACH) // _UP) * _UP
        self.register_buffer(
            "window", torch.hann_window(self.n_fft, dtype=torch.float32), persistent=False
        )

    window: Tensor

    def features(self, sound: Tensor) -> Tensor:
        """Sound [B, samples] to the encoder's vectors [B, F, C] of 20 ms; F is even."""
        frame = 2 * self.hop
        sound = F.pad(sound, (0, -sound.shape[-1] % frame))
        mel = self.mel(sound.float()) / 4 + 1
        vectors: Tensor = self.encoder(self.read(mel).mT)
        return vectors

    def forward(self, sound: Tensor, flat: Tensor, kept: Tensor) -> Tensor:
        """Reconstruct spectra of sound [B, samples] with straight-through gradients, for training:
        logarithms of magnitudes [B, 2 F, n_fft / 2 + 1]. Rows that are not `flat` [B] are stacked,
        with `kept` [B] books.
        """
        vectors = self.features(sound)
        single = self.from_flat(self.flat(self.to_flat(vectors).float()))
        several = self._pairs(self.stacked(self.to_stacked(_join(vectors)), kept))
        return self.spectrum(torch.where(flat[:, None, None], single, several))

    @torch.no_grad()
    def encode(self, sound: Tensor) -> Tensor:
        """Sound [B, samples] float32 to codes of the flat layout [B, F]."""
        return self.flat.encode(self.to_flat(self.features(sound)))

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Codes of the flat layout [B, F] to sound [B, F * hop] float32."""
        return self._sound(self.from_flat(self.flat.decode(codes)))

    @torch.no_grad()
    def encode_stacked(self, sound: Tensor) -> Tensor:
        """Sound [B, samples] float32 to codes of the stacked layout [B, F / 2, Q]."""
        return self.encode_features(self.features(sound))

    @torch.no_grad()
    def encode_features(self, features: Tensor) -> Tensor:
        """Vectors of `features` [B, F, C] to codes of the stacked layout [B, F / 2, Q]."""
        return self.stacked.encode(self.to_stacked(_join(features)))

    @torch.no_grad()
    def decode_stacked(self, codes: Tensor) -> Tensor:
        """Codes of the stacked layout [B, F / 2, Q] to sound [B, F * hop] float32."""
        return self._sound(self._pairs(self.stacked.decode(codes)))

    def _pairs(self, vectors: Tensor) -> Tensor:
        """Vectors [B, F / 2, C] of 40 ms to the decoder's input [B, F, C] of 20 ms."""
        return self.from_stacked(vectors).unflatten(-1, (2, -1)).flatten(1, 2)

    def spectrum(self, x: Tensor) -> Tensor:
        """The decoder: [B, F, C] to logarithms of magnitudes [B, 2 F, n_fft / 2 + 1] float32."""
        x = self.coarse(self.write(x.mT).mT)
        x = self.up(x).unflatten(-1, (_UP, -1)).flatten(1, 2)
        logs: Tensor = self.head(self.fine(x)).float()
        return logs.clamp(max=_LOUDEST)

    def target(self, sound: Tensor) -> Tensor:
        """The magnitudes of a sound [B, samples] that `spectrum` should give; samples as there."""
        return magnitudes(sound, self.n_fft, self.n_fft // _OVERLAP, self.window).mT

    def _sound(self, x: Tensor) -> Tensor:
        return invert(self.spectrum(x).exp(), self.window)


def _join(vectors: Tensor) -> Tensor:
    """Two vectors of 20 ms [B, F, C] to one of 40 ms [B, F / 2, 2 C]."""
    return vectors.unflatten(1, (-1, 2)).flatten(2)


def invert(wanted: Tensor, window: Tensor) -> Tensor:
    """Sound [B, T * n_fft / 4] whose short-time spectrum has the magnitudes `wanted` [B, T, n_fft /
    2 + 1], under a window [n_fft] of four hops.

    N. Perraudin, P. Balazs, P. L. Søndergaard, "A fast Griffin-Lim algorithm", WASPAA 2013,
    algorithm 2. It begins with the phases of sinusoids at the frequencies of the bins.
    """
    n_fft = len(window)
    bins = torch.arange(wanted.shape[-1], device=wanted.device)
    turns = torch.arange(wanted.shape[1], device=wanted.device)[:, None] * bins % _OVERLAP
    spectrum = torch.polar(wanted, (turns.float() * (2 * torch.pi / _OVERLAP)).expand(wanted.shape))
    before = torch.zeros_like(spectrum)
    hop = n_fft // _OVERLAP
    pad = (n_fft - hop) // 2
    for _ in range(_ITERATIONS):
        sound = overlap_add(spectrum, window)
        padded = F.pad(sound, (pad, n_fft - hop - pad))
        consistent = torch.stft(
            padded, n_fft, hop, window=window, center=False, return_complex=True
        ).mT
        moved = consistent + _MOMENTUM * (consistent - before)
        spectrum = wanted * moved / moved.abs().clamp(min=1e-8)
        before = consistent
    return overlap_add(spectrum, window)


def overlap_add(spectrum: Tensor, window: Tensor) -> Tensor:
    """Inverse short-time Fourier transform of [B, T, n_fft / 2 + 1], a hop of samples a column: [B,
    T * n_fft / 4].
    """
    n_fft = len(window)
    hop = n_fft // _OVERLAP
    frames = torch.fft.irfft(spectrum, n_fft) * window  # [B, T, n_fft]
    count = frames.shape[1]
    total = (count + _OVERLAP - 1) * hop
    weights = window.square().expand(1, count, -1)
    cut = (n_fft - hop) // 2
    both = torch.cat([frames, weights]).mT
    summed = F.fold(both, (1, total), (1, n_fft), stride=(1, hop))[:, 0, 0]
    summed = summed[:, cut : cut + count * hop]
    return summed[:-1] / summed[-1:]


FOLDER = Schema(
    "a speech codec",
    SpeechCodecConfig,
    "give the folder that save_codec wrote",
    "codec.json",
    "codec.safetensors",
    kind="SpeechCodec",
    dtype=torch.float32,
    option="codec",
)


def load_codec(folder: str | Path) -> SpeechCodec:
    """Load a codec from a folder, in evaluation mode, in float32, on the CPU; errors as of
    `open_folder`.
    """
    return open_folder(FOLDER, folder).build(SpeechCodec)


def save_codec(codec: SpeechCodec, folder: str | Path, dtype: torch.dtype = torch.float16) -> None:
    """Write a codec for `load_codec`, its weights in a dtype."""
    save_folder(FOLDER, folder, asdict(codec.config), codec.state_dict(), dtype)
