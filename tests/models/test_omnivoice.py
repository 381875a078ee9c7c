"""OmniVoice: names and shapes of a checkpoint, prompts, lengths, and layouts that are refused.

The published class itself, on random weights: the same logits to the last bit, and the same codes
of a ragged batch under guidance (`LayeredParallel`, without noise, the mask impossible).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel import LayeredParallel, TextToSpeech
from mmaccel.errors import MissingBackendError, OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig
from mmaccel.pipelines.models import omnivoice
from mmaccel.pipelines.models.omnivoice import (
    clean_text,
    estimate_frames,
    load_canvas,
)
from tests.fixtures.checkpoints import make_tokenizer
from tests.fixtures.masked_speech import (
    LLM,
    MARKS,
    SPECIAL,
    build_network,
    build_omnivoice,
    save_network,
)


def test_names_and_shapes_are_the_published_ones() -> None:
    """The layers' names are those of transformers' Qwen3."""
    network = build_network()
    state = network.state_dict()
    assert {name.removeprefix("llm.") for name in state} >= {*network.llm.state_dict()}
    own = {name: list(value.shape) for name, value in state.items() if name[:4] != "llm."}
    expected = {"audio_embeddings.weight": [21, 16], "audio_heads.weight": [21, 16]}
    assert own == expected | {"codebook_layer_offsets": [3]}
    assert state["codebook_layer_offsets"].tolist() == [0, 7, 14]


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    network = build_network()
    window = load_canvas(save_network(network, tmp_path, mask=6), LoadConfig())
    assert (window.books, window.vocab_size, window.mask_token) == (3, 7, 6)
    assert (window.nothing, window.n_ids, window.n_positions) == (47, 48, 64)
    text, frames = torch.tensor([[1, 2]]), torch.tensor([[[0, 5, 6], [1, 2, 3]]])
    there = torch.ones(1, 4, dtype=torch.bool)
    both = [net.logits(net.states(text, frames, there)) for net in (network.float(), window.model)]
    assert torch.equal(*both)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "csm"}, "expected model_type omnivoice .* received csm with qwen3"),
    ({"llm_config": {**LLM, "model_type": "llama"}}, "received omnivoice with llama"),
    ({"llm_config": None}, "received omnivoice with None"),
    ({"audio_mask_id": 7}, "audio_mask_id below audio_vocab_size .* 7 of 7"),
    ({"num_audio_codebook": 4}, r"'audio_embeddings.weight' \[28, 16\].* received \[21, 16\]"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_another_layout_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = save_network(build_network(), tmp_path, mask=6, **changes)
    with pytest.raises((UnsupportedModelError, OptionError), match=f"(?s)model: .*{message}"):
        load_canvas(folder, LoadConfig())


def test_a_prompt_is_a_style_and_the_text() -> None:
    speech = build_omnivoice()
    ids = [k - speech.window.vocab_size for k in speech.encode(" red\n [laughter]  fox", "blue")]
    names = speech.tokenizer.convert_ids_to_tokens(ids)
    assert names[:6] == [*MARKS[:1], "None", *MARKS[1:3], "blue", MARKS[3]]
    assert names[6:] == [MARKS[4], "red", "[laughter]", "fox", MARKS[5]]
    assert speech.encode("red", None)[4] == speech.encode("red", None)[1]  # no description


def test_a_codec_of_fewer_books_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="codec: expected 3 books of 6 .* 2 of 6"):
        build_omnivoice(books=2)


@pytest.mark.parametrize(
    ("text", "frames"),
    [  # "Nice to meet you." weighs 14.1 and lasts 25 frames; below 50 frames cubic roots count
        ("a" * 60, 106),  # 60 / 14.1 * 25 = 106.4
        ("a" * 10, 35),  # 17.7 frames: 50 (17.7 / 50) ** (1 / 3)
        ("你好，世界！" * 4, 92),  # 4 (4 * 3 + 2 / 2) / 14.1 * 25
        ("12 3", 36),  # digits weigh 3.5, a space 0.2
        ("", 0),
    ],
)
def test_how_long_a_text_lasts(text: str, frames: int) -> None:
    assert estimate_frames(text) == max(1, frames)


def test_spaces_beside_chinese_and_line_ends_go() -> None:
    assert clean_text(" a  b\n c（d） 你 好 x") == "a b c(d)你好x"


def test_without_torchaudio_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(omnivoice, "find_spec", lambda name: None)
    with pytest.raises(MissingBackendError, match="package torchaudio"):
        omnivoice.load_omnivoice(tmp_path, None, tmp_path, LoadConfig())


def test_it_speaks_with_the_codec_of_its_folder(tmp_path: Path) -> None:
    pytest.importorskip("torchaudio")
    from transformers import HiggsAudioV2TokenizerConfig, HiggsAudioV2TokenizerModel

    dac = dict(
        model_type="dac", encoder_hidden_size=4, decoder_hidden_size=32, hidden_size=16,
        downsampling_ratios=[8, 5, 4, 2, 3], upsampling_ratios=[8, 5, 4, 2, 3],
    )  # fmt: skip
    hubert = dict(
        model_type="hubert", hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, conv_dim=[4] * 7, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    config = HiggsAudioV2TokenizerConfig(
        codebook_size=6, codebook_dim=4, target_bandwidths=[0.225],
        acoustic_model_config=dac, semantic_model_config=hubert,
    )  # fmt: skip
    torch.manual_seed(2)
    HiggsAudioV2TokenizerModel(config).save_pretrained(tmp_path / "audio_tokenizer")
    make_tokenizer(SPECIAL, 12, 40).save_pretrained(tmp_path)
    pipe = TextToSpeech.from_pretrained(save_network(build_network(), tmp_path, mask=6))
    spoken = pipe(["red", "a red fox"], voice="blue", policy=LayeredParallel(4), seed=1)
    for made, text in zip(spoken.utterances, ["red", "a red fox"], strict=True):
        frames = estimate_frames(text)
        assert made.tokens.shape == (3 * frames,) and made.passes == 4 and made.is_finished
        assert made.waveform.shape == (960 * frames,) and made.sample_rate == 24_000
