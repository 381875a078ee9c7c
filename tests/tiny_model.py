"""A text-to-image model of the demo's make with random weights, 16 tokens a picture."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from mmaccel.tokenizers_vq.autoencoder import PictureTokenizer
from mmaccel.tokenizers_vq.load import save_tokenizer

WORDS = ["a", "red", "blue", "circle", "square", "above", "on", "grass"]
CAPTIONS = ["a red circle", "a blue square above a red circle on grass", "blue square"]
N_CODES, N_TOKENS, MAX_WORDS = 30, 16, 12


def build_tiny(
    folder: Path,
    n_tokens_side: int = 4,
    words: list[str] = WORDS,
    max_words: int = MAX_WORDS,
    **config: object,
) -> Path:
    """Write the folder `TextToImage.from_pretrained` reads.

    Weights are large, so that the next token depends strongly on the ones before it.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    arguments = {
        "size": 4 * n_tokens_side, "levels": [6, 5],
        "encoder_width": 8, "encoder_depth": 1, "decoder_width": 8, "decoder_depth": 1,
        "fine_width": 8, "fine_depth": 1,
    }  # fmt: skip
    save_tokenizer(PictureTokenizer(**arguments), arguments, folder)
    settings = dict(
        vocab_size=N_CODES + 3 + len(words), hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=max_words + 2 + n_tokens_side**2, initializer_range=0.25,
        bos_token_id=N_CODES, eos_token_id=None, pad_token_id=N_CODES + 2,
        tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**{**settings, **config})).save_pretrained(folder)
    said = {"words": words, "max_words": max_words}
    (folder / "words.json").write_text(json.dumps(said), encoding="utf-8")
    return folder


def masked_beside_plain(
    shelf: Path, n_tokens_side: int = 4, words: list[str] = WORDS, max_words: int = MAX_WORDS
) -> tuple[Path, Path]:
    """Two models beside each other: the masked one, the first, draws in the other's tokens."""
    plain = build_tiny(shelf / "plain", n_tokens_side, words, max_words)
    mask = N_CODES + 3 + len(words)
    masked = build_tiny(shelf / "masked", n_tokens_side, words, max_words, vocab_size=mask + 1)
    for name in ("tokenizer.json", "tokenizer.safetensors"):
        (masked / name).unlink()
    said = json.loads((masked / "words.json").read_text(encoding="utf-8"))
    said |= {"mask": mask, "logit_shift": 1, "picture_tokenizer": "plain"}
    (masked / "words.json").write_text(json.dumps(said), encoding="utf-8")
    return masked, plain


def break_weights(folder: Path) -> Path:
    """Put a NaN into the generator, so that all its logits are NaN."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    return folder
