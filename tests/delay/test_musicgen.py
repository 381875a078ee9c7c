"""MusicGen and MusicGen Melody: delay patterns, guidance, prompts of sound, stereo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.errors import AttachError, UnsupportedModelError
from mmaccel.pipelines.hosts.delay import family
from mmaccel.pipelines.hosts.delay.musicgen import MusicgenSteps
from tests.delay.hosts import (
    BITWISE,
    WIDE,
    Music,
    assert_same_distribution,
    is_refused,
    open_host,
)
from tests.delay.models import BOOKS, CODES, MASK, TEXT, make_musicgen


@pytest.mark.parametrize("channels", [1, 2])
def test_calls_that_begin_with_a_sound(channels: int) -> None:
    """The model's own codec encodes it, each channel into books of its own."""
    host = Music(make_musicgen(BOOKS * channels, channels=channels))
    codec = host.model.audio_encoder
    generator = torch.Generator().manual_seed(0)
    for layer in codec.quantizer.layers:
        layer.codebook.embed.normal_(0, 0.03, generator=generator)
    sound = 10 * torch.randn(3, channels, 3 * 4, generator=generator)  # 4 samples a frame
    given = {"input_values": sound, "guidance_scale": 2.0, "max_length": 9 + 2 * channels}
    own = host.call(**given)
    codes = codec.encode(sound[:, :1]).audio_codes[0]  # [B, K, T]
    assert torch.equal(own[:, :BOOKS, : codes.shape[2]], codes)
    assert own.shape[2] > codes.shape[2] and len(codes.unique()) > 4
    assert torch.equal(host.attached(WIDE, **given)[0], own)


def test_calls_with_a_melody() -> None:
    host = open_host("melody")
    generator = torch.Generator().manual_seed(0)
    given = {"input_features": torch.rand(3, 4, 12, generator=generator), "guidance_scale": 2.0}
    own = host.call(**given)
    assert not torch.equal(own, host.call(guidance_scale=2.0))
    assert torch.equal(host.attached(WIDE, **given)[0], own)


def test_processors_of_single_codes_go_along() -> None:
    host = open_host("musicgen")
    options = {"suppress_tokens": [12, 15], "typical_p": 0.9}
    own = host.call(**options)
    made, _ = host.attached(WIDE, **options)
    assert torch.equal(made, own) and not torch.isin(made, torch.tensor([12, 15])).any()
    drawn, _ = host.attached(BITWISE[0], do_sample=True, **options)
    assert torch.equal(host.attached(WIDE, do_sample=True, **options)[0], drawn)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a penalty": ({"repetition_penalty": 1.2}, "RepetitionPenaltyLogitsProcessor, which reads"),
    "a penalty before guidance": (
        {"repetition_penalty": 1.2, "guidance_scale": 3.0},
        "guidance after another processor",
    ),
    "an end": ({"eos_token_id": 3}, "an end token"),
    "a mask of the codes": (
        {"decoder_attention_mask": torch.ones(3, 1)},
        "decoder_attention_mask",
    ),
    "several sounds of a text": (
        {"num_return_sequences": 2, "do_sample": True},
        "num_return_sequences, which takes the books of a sound apart",
    ),
}


def _shorten(mask: Tensor) -> Tensor:
    return mask[:, :-1]


def _give_one_row(mask: Tensor) -> Tensor:
    mask[:BOOKS, 5] = 0
    return mask


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_shorten, "a pattern of another length than the call"),
        (_give_one_row, "rows with different patterns"),
        (torch.zeros_like, "a pattern in which nothing is generated"),
    ],
)
def test_patterns_of_another_decoder(
    change: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = open_host("musicgen")
    decoder = host.model.decoder
    build = decoder.build_delay_pattern_mask

    def build_changed(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        ids, mask = build(*args, **options)
        return ids, change(mask)

    monkeypatch.setattr(decoder, "build_delay_pattern_mask", build_changed)
    assert is_refused(host, says)


def test_what_attach_refuses() -> None:
    host = open_host("musicgen")
    with mmaccel.attach(host.model, "jacobi", layout=mmaccel.Frames(((0, 8),), CODES)):
        with pytest.raises(AttachError, match="several codebooks a step"):
            host.call()
    other = make_musicgen()
    other.decoder.config._attn_implementation = "flex_attention"
    found = mmaccel.supports(other)
    assert not found and "flex_attention" in found.reason
    with pytest.raises(UnsupportedModelError):
        mmaccel.attach(host.model, "jacobi", kv_cache="snapkv")


@pytest.mark.parametrize(
    "options",
    [{"top_k": 0}, {"top_k": 0, "top_p": 0.7, "temperature": 2.0}],
    ids=["plain", "top_p"],
)
def test_codes_have_the_models_distribution(options: dict[str, Any]) -> None:
    """Against the model's own scores, after its warpers, along what it draws itself."""
    host = Music(make_musicgen(2, 5, num_hidden_layers=1))
    rows = 4000
    text = {"input_ids": TEXT[1:2].expand(rows, -1), "attention_mask": MASK[1:2].expand(rows, -1)}
    options = options | text | {"do_sample": True, "max_length": 4}
    torch.manual_seed(0)
    recorded = {"return_dict_in_generate": True, "output_scores": True}
    scores = host.generate(**options, **recorded).scores
    drawn = host.found[0][0]  # [B, K, T]
    chances = torch.ones(rows, dtype=torch.float64)
    for book in range(2):
        for frame in range(2):  # which the book has a step later than the one before
            own = scores[frame + book].view(rows, 2, -1)[:, book].double().softmax(-1)
            chances *= own.gather(1, drawn[:, book, frame, None])[:, 0]
    assert_same_distribution(host, options, drawn, chances)


def test_a_pattern_that_is_applied_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    host = open_host("musicgen")
    own = host.call()
    find = family.list_cells

    def twice(free: Tensor) -> Any:
        again = free.clone()
        for book in range(1, BOOKS):
            again[:, book] = False
            again[book:, book] = free[:-book, book]
        return find(again)

    monkeypatch.setattr(family, "list_cells", twice)
    made, _ = host.attached("jacobi")
    assert made.shape != own.shape or not torch.equal(made, own)


def test_branches_that_are_exchanged_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"guidance_scale": 3.0}
    host = open_host("musicgen")
    own = host.call(**options)
    forward = MusicgenSteps.forward

    def exchanged(self: MusicgenSteps, codes: Tensor, at: Tensor) -> Tensor:
        return torch.cat(forward(self, codes, at).chunk(2)[::-1])

    monkeypatch.setattr(MusicgenSteps, "forward", exchanged)
    assert not torch.equal(host.attached("jacobi", **options)[0], own)
