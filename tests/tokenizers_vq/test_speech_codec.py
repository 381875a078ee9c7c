"""The speech codec: shapes, codes, residual books, Griffin-Lim, files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mmaccel.tokenizers_vq.mel import LogMel, magnitudes, mel_filters
from mmaccel.tokenizers_vq.speech_codec import (
    ResidualCodes,
    SpeechCodec,
    SpeechCodecConfig,
    invert,
    load_codec,
    overlap_add,
    save_codec,
)
from tests.fixtures.voices import TINY_CODEC, build_codec

HOP = 320


def make_sound(rows: int, frames: int) -> torch.Tensor:
    """A few harmonics that glide, and noise."""
    torch.manual_seed(1)
    time = torch.arange(frames * HOP) / 16_000
    pitch = torch.linspace(110, 180, frames * HOP)
    phase = (2 * torch.pi * pitch / 16_000).cumsum(0)
    tones = sum(torch.sin(k * phase) / k for k in range(1, 9))
    return 0.2 * tones * (time < time[-1] - 0.02) + 0.003 * torch.randn(rows, frames * HOP)


def test_codes_and_sound_of_both_layouts() -> None:
    codec = build_codec()
    sound = make_sound(2, 9)  # an odd number of frames is filled up
    flat = codec.encode(sound)
    stacked = codec.encode_stacked(sound)
    assert flat.shape == (2, 10) and stacked.shape == (2, 5, 3)
    assert 0 <= int(flat.min()) and int(flat.max()) < codec.flat_size == 8
    assert 0 <= int(stacked.min()) and int(stacked.max()) < codec.book_size == 6
    assert codec.decode(flat).shape == codec.decode_stacked(stacked).shape == (2, 10 * HOP)
    assert torch.equal(codec.encode_features(codec.features(sound)), stacked)


def test_training_decodes_the_same_codes() -> None:
    """With all books, the straight-through pass has the spectra of the decoded codes."""
    codec = build_codec()
    sound = make_sound(2, 10)
    flat = torch.tensor([True, False])
    logs = codec(sound, flat, torch.tensor([3, 3]))
    single = codec.from_flat(codec.flat.decode(codec.encode(sound[:1])))
    several = codec.stacked.decode(codec.encode_stacked(sound[1:]))
    several = codec.from_stacked(several).unflatten(-1, (2, -1)).flatten(1, 2)
    wanted = codec.spectrum(torch.cat([single, several]))
    assert torch.allclose(logs, wanted, atol=1e-5)
    assert logs.shape == codec.target(sound).shape


def test_fewer_books_are_the_sum_of_the_first() -> None:
    torch.manual_seed(0)
    books = ResidualCodes(8, (3, 3), 4)
    vectors = torch.randn(3, 5, 8)
    codes = books.encode(vectors)
    for kept in range(1, 5):
        found = books(vectors, torch.full((3,), kept))
        parts = [books.outward[k](books.quantizer.decode(codes[..., k])) for k in range(kept)]
        assert torch.allclose(found, torch.stack(parts).sum(0), atol=1e-6)
    assert torch.allclose(books(vectors), books.decode(codes), atol=1e-6)


def test_overlap_add_inverts_the_transform() -> None:
    sound = make_sound(2, 8)
    window = torch.hann_window(640)
    padded = torch.nn.functional.pad(sound, (240, 240))
    spectrum = torch.stft(
        padded, 640, 160, window=window, center=False, return_complex=True
    ).mT  # fmt: skip
    assert torch.allclose(overlap_add(spectrum, window), sound, atol=1e-6)


def test_griffin_lim_finds_sound_with_the_magnitudes() -> None:
    sound = make_sound(2, 20)
    window = torch.hann_window(640)
    wanted = magnitudes(sound, 640, 160, window).mT
    found = invert(wanted, window)
    again = magnitudes(found, 640, 160, window).mT
    assert float((again - wanted).norm() / wanted.norm()) < 0.15
    assert torch.equal(invert(wanted, window), found)  # no random start


def test_rows_do_not_affect_each_other() -> None:
    """Spectra; sound is decoded row by row, as Griffin-Lim enlarges differences of rounding."""
    codec = build_codec()
    codes = torch.randint(8, (3, 12), generator=torch.Generator().manual_seed(0))
    vectors = codec.from_flat(codec.flat.decode(codes))
    together = codec.spectrum(vectors)
    assert torch.allclose(together[1:2], codec.spectrum(vectors[1:2]), atol=1e-5)


def test_mel_filters_cover_all_frequencies() -> None:
    filters = mel_filters(40, 1024, 16_000)
    assert filters.shape == (40, 513) and bool((filters >= 0).all())
    assert torch.allclose(filters.sum(1), torch.ones(40), atol=1e-5)
    peaks = filters.argmax(1)
    assert bool((peaks.diff() > 0).all())
    assert LogMel(16_000, HOP)(make_sound(2, 6)).shape == (2, 80, 6)


def test_a_codec_is_the_same_from_its_files(tmp_path: Path) -> None:
    codec = build_codec()
    save_codec(codec, tmp_path, torch.float32)
    found = load_codec(tmp_path)
    sound = make_sound(1, 8)
    assert torch.equal(found.encode(sound), codec.encode(sound))
    assert torch.equal(found.decode(found.encode(sound)), codec.decode(codec.encode(sound)))
    config = json.loads((tmp_path / "codec.json").read_text(encoding="utf-8"))
    assert config == {"class": "SpeechCodec", **TINY_CODEC}


@pytest.mark.parametrize("books", [1, 4])
def test_books_are_as_many_as_asked(books: int) -> None:
    codec = SpeechCodec(SpeechCodecConfig(**{**TINY_CODEC, "books": books})).eval()
    assert codec.encode_stacked(make_sound(1, 4)).shape == (1, 2, books)
