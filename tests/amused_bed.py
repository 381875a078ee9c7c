"""aMUSEd's own classes with tiny random weights: pipeline, transformer, decoder, text encoder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

CODES, MASK, SIDE = 32, 32, 4


class Words:
    """A tokenizer of one letter a token."""

    model_max_length = 8

    def __call__(self, prompt: list[str], **options: Any) -> Any:
        rows = [[0] + [3 + ord(letter) % 60 for letter in text][:6] + [2] for text in prompt]
        return SimpleNamespace(input_ids=torch.tensor([row + [1] * (8 - len(row)) for row in rows]))


def build_pipe(dtype: torch.dtype = torch.float64) -> Any:
    """A pipeline without progress bars, the same at every call.

    `pipe.seen` has the tokens of every pass of the transformer.
    """
    from diffusers import AmusedPipeline, AmusedScheduler, UVit2DModel, VQModel
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    torch.manual_seed(0)
    transformer = UVit2DModel(
        hidden_size=32, use_bias=False, hidden_dropout=0.0, cond_embed_dim=32,
        micro_cond_encode_dim=2, micro_cond_embed_dim=10, encoder_hidden_size=32,
        vocab_size=CODES + 1, codebook_size=CODES, in_channels=32, block_out_channels=32,
        num_res_blocks=1, downsample=True, upsample=True, block_num_heads=2, num_hidden_layers=1,
        num_attention_heads=2, attention_dropout=0.0, intermediate_size=32, layer_norm_eps=1e-6,
        ln_elementwise_affine=True, sample_size=SIDE,
    )  # fmt: skip
    vqvae = VQModel(
        act_fn="silu", block_out_channels=[32], down_block_types=["DownEncoderBlock2D"],
        in_channels=3, latent_channels=32, layers_per_block=1, norm_num_groups=32,
        num_vq_embeddings=CODES, out_channels=3, sample_size=32, lookup_from_codebook=True,
        up_block_types=["UpDecoderBlock2D"], mid_block_add_attention=False,
    )  # fmt: skip
    words = CLIPTextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16, projection_dim=32, bos_token_id=0,
        eos_token_id=2, pad_token_id=1,
    )  # fmt: skip
    encoder = CLIPTextModelWithProjection(words)
    for part in (transformer, encoder):
        for weight in part.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.3)
    pipe = AmusedPipeline(
        vqvae=vqvae.to(dtype).eval(), tokenizer=Words(), text_encoder=encoder.to(dtype).eval(),
        transformer=transformer.to(dtype).eval(), scheduler=AmusedScheduler(mask_token_id=MASK),
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    seen: list[torch.Tensor] = []
    transformer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    pipe.seen = seen
    return pipe
