"""Tiny models of several codebooks a step, of transformers' own classes, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.depth.models import fill

BOOKS = 4
CODES = 16
PAD = CODES
TEXT = torch.tensor([[0, 0, 5, 7], [3, 4, 9, 2], [0, 6, 6, 8]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])


def make_musicgen(
    books: int = BOOKS, codes: int = CODES, channels: int = 1, melody: bool = False, **decoder: Any
) -> Any:
    import transformers

    name = "MusicgenMelody" if melody else "Musicgen"
    config = getattr(transformers, f"{name}Config")(
        text_encoder=transformers.T5Config(
            vocab_size=20, d_model=12, d_kv=4, d_ff=16, num_layers=1, num_heads=2
        ).to_dict(),
        audio_encoder=transformers.EncodecConfig(
            hidden_size=16, num_filters=2, codebook_size=CODES, codebook_dim=16,
            upsampling_ratios=[2, 2], num_lstm_layers=1, chunk_length_s=None,
            target_bandwidths=[48.0], sampling_rate=24000,
        ).to_dict(),
        decoder=getattr(transformers, f"{name}DecoderConfig")(
            vocab_size=codes, num_codebooks=books, audio_channels=channels, pad_token_id=codes,
            bos_token_id=codes, **{
                "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32,
                **decoder,
            },
        ).to_dict(),
        **({"chroma_length": 5} if melody else {}),
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    fill(model, 0.4)
    model.generation_config.update(
        decoder_start_token_id=codes, pad_token_id=codes, bos_token_id=codes, eos_token_id=None,
        max_length=14, do_sample=False, guidance_scale=None, top_k=50,
    )  # fmt: skip
    return model


def keep_codes(model: Any) -> list[Tensor]:
    """What the codec is asked to decode from now on; its sound is silence."""
    from types import SimpleNamespace

    found: list[Tensor] = []

    def decode(codes: Tensor, **_: Any) -> Any:
        found.append(codes)
        return SimpleNamespace(audio_values=codes.float().flatten(1))

    model.audio_encoder.decode = decode
    return found
