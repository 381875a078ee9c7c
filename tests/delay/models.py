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
            target_bandwidths=[96.0], sampling_rate=24000,
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


DIA_DELAYS = (0, 2, 3)
DIA_END = 16


def make_dia(ends: float = 2.0, codes: int = 16, delays: tuple[int, ...] = DIA_DELAYS) -> Any:
    """Dia, with the ids `codes`, `codes + 1` and `codes + 2` for end, padding and begin.

    Args:
        ends: the larger, the sooner sounds end.
        codes: of each book.
        delays: of the books.
    """
    from transformers import DiaConfig, DiaForConditionalGeneration

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
    config = DiaConfig(
        encoder_config={
            **sizes, "num_key_value_heads": 2, "intermediate_size": 24, "vocab_size": 20
        },
        decoder_config={
            **sizes, "num_key_value_heads": 1, "intermediate_size": 24, "vocab_size": codes + 4,
            "num_channels": len(delays), "cross_num_attention_heads": 2, "cross_head_dim": 8,
            "cross_num_key_value_heads": 2, "cross_hidden_size": 16, "eos_token_id": codes,
            "pad_token_id": codes + 1, "bos_token_id": codes + 2,
        },
        delay_pattern=list(delays),
    )  # fmt: skip
    model = DiaForConditionalGeneration(config).eval()
    fill(model, 0.4)
    model.logits_dense.weight.data[codes] *= ends
    model.generation_config.update(
        decoder_start_token_id=codes + 2, pad_token_id=codes + 1, bos_token_id=codes + 2,
        eos_token_id=codes, max_length=12, do_sample=False, top_k=8,
    )  # fmt: skip
    return model


def delay_prompt(codes: Tensor, n_codes: int = 16, delays: tuple[int, ...] = DIA_DELAYS) -> Any:
    """What Dia's processor makes of codes `[B, T, K]`: a first frame, the delays, free cells."""
    begin = codes.new_full((len(codes), 1, len(delays)), n_codes + 2)
    framed = torch.cat([begin, codes], 1)
    n_frames = framed.shape[1]
    grid = codes.new_full((len(codes), n_frames + max(delays), len(delays)), n_codes + 1)
    for book, first in enumerate(delays):
        grid[:, :first, book] = n_codes + 2
        grid[:, first : first + n_frames, book] = framed[..., book]
    mask = torch.ones(grid.shape[:2], dtype=torch.int64)
    return {"decoder_input_ids": grid, "decoder_attention_mask": mask}


HIGGS_BOOKS = 3
HIGGS_END = 13
HIGGS_PADDING, AUDIO, AUDIO_BEGIN, AUDIO_DELAY, TEXT_END = 19, 20, 21, 22, 23


def make_higgs(ends: float = 1.5, codes: int = 12, books: int = HIGGS_BOOKS) -> Any:
    """Higgs Audio v2, with the ids `codes` and `codes + 1` that begin and end a book.

    Args:
        ends: the larger, the sooner sounds end.
        codes: of each book.
        books: K.
    """
    from transformers import HiggsAudioV2Config, HiggsAudioV2ForConditionalGeneration

    config = HiggsAudioV2Config(
        vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=64,
        pad_token_id=HIGGS_PADDING, bos_token_id=1, eos_token_id=TEXT_END, num_codebooks=books,
        codebook_size=codes + 2, audio_token_id=AUDIO, audio_bos_token_id=AUDIO_BEGIN,
        audio_delay_token_id=AUDIO_DELAY, audio_stream_bos_id=codes, audio_stream_eos_id=codes + 1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model = HiggsAudioV2ForConditionalGeneration(config).eval()
    fill(model, 0.4)
    model.audio_lm_head.weight.data[codes + 1] *= ends
    model.generation_config.update(
        pad_token_id=HIGGS_PADDING, eos_token_id=TEXT_END, max_new_tokens=10, do_sample=False
    )
    return model
