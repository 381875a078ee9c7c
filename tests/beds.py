"""Tiny models of transformers' image families, with random weights, from its own configs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BODY: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=128, initializer_range=0.25, pad_token_id=0,
)  # fmt: skip
_TEXT = _BODY | dict(vocab_size=40, bos_token_id=1, eos_token_id=None)
_VQ: dict[str, Any] = dict(
    num_embeddings=16, base_channels=32, channel_multiplier=[1, 1], num_res_blocks=1,
    attn_resolutions=[],
)  # fmt: skip

FAMILIES = {"imagegpt": "imagegpt", "chameleon": "causal_lm", "emu3": "causal_lm"}
FAMILIES |= {"glm_image": "glm_image"}
GRIDS = torch.tensor([[1, 4, 4], [1, 2, 2]])  # the large grid, and the preview made before it
LENGTHS = {"imagegpt": 24, "chameleon": 24, "emu3": 24, "glm_image": 21}


def build_bed(name: str) -> Any:
    """A model in evaluation mode, float32, the same at every call."""
    if name == "lumina":
        return _chameleon(levels=5)
    return {"imagegpt": _imagegpt, "chameleon": _chameleon, "emu3": _emu3, "glm_image": _glm_image}[
        name
    ]()


def prompts(name: str, rows: list[list[int]]) -> dict[str, Tensor]:
    """What `generate` takes for prompts of these ids, padded on the left."""
    if name == "imagegpt":  # no padding, and a start id of its own
        rows = [[32] + [1 + token % 31 for token in row][: min(map(len, rows))] for row in rows]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    if name == "imagegpt":
        return {"input_ids": ids}
    if name != "glm_image":
        return {"input_ids": ids, "attention_mask": mask}
    return {
        "input_ids": torch.cat([ids, torch.full((len(rows), 1), 16)], 1),  # ends with image start
        "attention_mask": torch.cat([mask, torch.ones(len(rows), 1).long()], 1),
        "image_grid_thw": GRIDS.repeat(len(rows), 1),
        "images_per_sample": torch.full((len(rows),), 2),
    }


def _imagegpt() -> Any:
    import transformers as hf

    config = hf.ImageGPTConfig(
        vocab_size=33, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.25
    )
    torch.manual_seed(7)
    return hf.ImageGPTForCausalImageModeling(config).eval()


def _chameleon(levels: int = 2) -> Any:
    import transformers as hf

    names = {"<image>": 4, "<racm3:break>": 5, "<eoss>": 6}
    for code in range(16):  # 12 is "IMGIMGBCZ"; ids and codes do not run in step
        letters = "".join(chr(ord("A") + int(digit)) for digit in str(code))
        names[f"IMGIMG{letters}Z"] = 10 + (5 * code) % 16
    vq = _VQ | dict(embed_dim=8, latent_channels=8, resolution=16, double_latent=False)
    vq |= dict(channel_multiplier=[1] * levels)
    config = hf.ChameleonConfig(**_TEXT, num_key_value_heads=4, vocabulary_map=names, vq_config=vq)
    torch.manual_seed(7)
    return hf.ChameleonForConditionalGeneration(config).eval()


def _emu3() -> Any:
    import transformers as hf

    names = {"<image>": 4, "<|extra_200|>": 5}
    names |= {f"<|visual token {code:06}|>": 10 + code for code in range(16)}
    vq = {k: v for k, v in _VQ.items() if k != "num_embeddings"}
    vq |= dict(
        codebook_size=16,
        embed_dim=4,
        latent_channels=4,
        temporal_downsample_factor=1,
        hidden_size=32,
    )
    config = hf.Emu3Config(
        text_config=_TEXT | {"num_key_value_heads": 2}, vq_config=vq, vocabulary_map=names
    )
    torch.manual_seed(9)
    return hf.Emu3ForConditionalGeneration(config).eval()


def _glm_image() -> Any:
    import transformers as hf

    rope = dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 1, 1])
    text = _BODY | dict(
        vocab_size=60, vision_vocab_size=24, num_key_value_heads=2, eos_token_id=None,
        rope_parameters=rope | {"partial_rotary_factor": 1.0},
    )  # fmt: skip
    config = hf.GlmImageConfig(
        text_config=text,
        vision_config=dict(
            depth=1, hidden_size=16, num_heads=2, image_size=32, patch_size=16, intermediate_size=32
        ),
        vq_config=dict(embed_dim=8, num_embeddings=16, latent_channels=16, in_channels=3),
        image_token_id=50, image_start_token_id=16, image_end_token_id=17,
    )  # fmt: skip
    torch.manual_seed(7)
    return hf.GlmImageForConditionalGeneration(config).eval()


def build_janus(n_codes: int = 16) -> Any:
    """Janus, 16 picture tokens of `n_codes` codes."""
    import transformers as hf

    vision = dict(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4,
        projection_dim=32, num_image_tokens=16, intermediate_size=32,
    )  # fmt: skip
    vq = _VQ | dict(
        num_embeddings=n_codes, embed_dim=8, latent_channels=8, num_patches=4, projection_dim=32,
        image_token_embed_dim=32,
    )  # fmt: skip
    text = _TEXT | dict(model_type="llama", num_key_value_heads=4)
    config = hf.JanusConfig(text_config=text, vision_config=vision, vq_config=vq, image_token_id=5)
    torch.manual_seed(7)
    model = hf.JanusForConditionalGeneration(config).eval()
    for name, value in dict(pad_token_id=0, bos_token_id=1, eos_token_id=3).items():
        setattr(model.generation_config, name, value)
    model.generation_config.generation_kwargs = {"boi_token_id": 7}
    return model


def janus_prompts(rows: list[list[int]]) -> dict[str, Tensor]:
    """`[bos, words, boi]`, padded on the left."""
    return prompts("janus", [[1, *row, 7] for row in rows])
