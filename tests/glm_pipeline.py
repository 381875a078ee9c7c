"""GlmImagePipeline of diffusers with tiny random parts."""

from __future__ import annotations

from typing import Any

import torch

from tests.beds import build_bed


class Inputs(dict[str, Any]):
    """What a processor hands out."""

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def to(self, _: Any) -> Inputs:
        return self


class Processor:
    """Four words a prompt, the grids of the picture, and the token that opens it."""

    def apply_chat_template(self, messages: Any, *, target_h: int, target_w: int, **_: Any) -> Any:
        words = [len(m[0]["content"][0]["text"]) for m in messages]
        ids = torch.tensor([[26 + n % 20, 27, 28 + n % 7, 29, 16] for n in words])
        h, w = target_h // 32, target_w // 32
        grids = torch.tensor([[1, h, w], [1, h // 2, w // 2]]).repeat(len(words), 1)
        return Inputs(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            image_grid_thw=grids,
            images_per_sample=torch.full((len(words),), 2),
        )


class Tokenizer:
    """Bytes of the words to be written into the picture; there are none."""

    pad_token_id = 0

    def __call__(self, text: Any, **_: Any) -> Any:
        return Inputs(input_ids=[[1, 2] for _ in text])


def build_pipeline() -> Any:
    import diffusers
    import transformers as hf
    from diffusers.models.transformers.transformer_glm_image import GlmImageTransformer2DModel

    generator = build_bed("glm_image")
    torch.manual_seed(3)
    text = hf.T5EncoderModel(
        hf.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=40)
    ).eval()
    vae = diffusers.AutoencoderKL(
        block_out_channels=[8, 8, 8, 8], latent_channels=4, norm_num_groups=4,
        down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    ).eval()  # fmt: skip
    painter = GlmImageTransformer2DModel(
        in_channels=4, out_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
        text_embed_dim=16, time_embed_dim=16, condition_dim=8, prior_vq_quantizer_codebook_size=24,
    ).eval()  # fmt: skip
    pipe = diffusers.GlmImagePipeline(
        tokenizer=Tokenizer(), processor=Processor(), text_encoder=text,
        vision_language_encoder=generator, vae=vae, transformer=painter,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe
