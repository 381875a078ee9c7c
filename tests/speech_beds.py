"""Tiny speech checkpoints on disk with their codecs, random weights, in the libraries' classes."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.checkpoints import NUMBERS, WORDS, make_tokenizer
from tests.tiny_lms import build_lm

TEXTS = ["a red fox in the snow", "blue cat", "the grass"]
FAMILIES = ("llasa", "orpheus")
SECONDS = {"llasa": 0.05, "orpheus": 0.008}  # 40 codes, and 6 frames of 7
END = {"llasa": 8, "orpheus": 16}  # ids of the tokens that end an utterance
_SAID = "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}<|eot_id|>{% endfor %}"
_UNDERSTOOD = ("<|TEXT_UNDERSTANDING_START|>", "<|TEXT_UNDERSTANDING_END|>")
_SPOKEN = ("<|SPEECH_GENERATION_START|>", "<|SPEECH_GENERATION_END|>")
LLASA_CODES, SNAC_CODES = 16, 4
FIRST = 24  # id of the first code, in both


def build_speech(family: str, folder: Path) -> tuple[Path, Path]:
    """Write a checkpoint and its codec; the paths of both."""
    return {"llasa": _llasa, "orpheus": _orpheus}[family](folder)


def _language_model(folder: Path, special: dict[str, int], end: str, weight: float) -> None:
    words = max(special.values()) + 1
    size = words + len(WORDS + NUMBERS) + 3
    tokenizer = make_tokenizer(special, words, size, bos_token="<s>")
    tokenizer.chat_template = _SAID
    tokenizer.save_pretrained(folder)
    model = build_lm("llama", vocab_size=size, max_position_embeddings=160)
    with torch.no_grad():  # some utterances end early
        model.lm_head.weight[special[end]] *= weight
    model.save_pretrained(folder)


def _llasa(folder: Path) -> tuple[Path, Path]:
    from transformers import Wav2Vec2BertConfig, Xcodec2Config, Xcodec2Model

    names = ["<pad>", "<s>", "<unk>", "<|eot_id|>", "<|start|>", *_UNDERSTOOD, *_SPOKEN]
    special = {name: k for k, name in enumerate(names)}
    special |= {f"<|s_{k}|>": FIRST + k for k in range(LLASA_CODES)}
    _language_model(folder / "llasa", special, _SPOKEN[1], 1.5)
    semantic = Wav2Vec2BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        feature_projection_input_dim=160, conv_depthwise_kernel_size=3,
    )  # fmt: skip
    config = Xcodec2Config(
        hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, encoder_hidden_size=4, downsampling_ratios=[2, 2, 5],
        quantization_dim=80, quantization_levels=[2, 2, 2, 2], sampling_rate=16000,
        semantic_model_config=semantic.to_dict(),
    )  # fmt: skip
    torch.manual_seed(5)
    Xcodec2Model(config).save_pretrained(folder / "xcodec2")
    return folder / "llasa", folder / "xcodec2"


def _orpheus(folder: Path) -> tuple[Path, Path]:
    from snac import SNAC

    special = {"<pad>": 0, "<s>": 1, "<unk>": 2, "<|eot_id|>": 3}
    special |= {f"<custom_token_{k}>": FIRST - 10 + k for k in range(10 + 7 * SNAC_CODES)}
    _language_model(folder / "orpheus", special, "<custom_token_2>", 0.5)
    config = dict(
        sampling_rate=24000, encoder_dim=4, encoder_rates=[2, 4], latent_dim=16, decoder_dim=16,
        decoder_rates=[4, 2], attn_window_size=None, codebook_size=SNAC_CODES, codebook_dim=4,
        vq_strides=[4, 2, 1], noise=True, depthwise=True,
    )  # fmt: skip
    torch.manual_seed(5)
    place = folder / "snac"
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
    torch.save(SNAC(**config).state_dict(), place / "pytorch_model.bin")
    return folder / "orpheus", place
