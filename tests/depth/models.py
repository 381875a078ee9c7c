"""Tiny speech models of transformers' own classes, with random weights, and calls of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.pipelines.hosts.transformers_release import CACHE

CODES = 32
MIMI = {
    "model_type": "mimi", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 32, "num_filters": 8, "codebook_size": CODES,
    "codebook_dim": 16, "num_semantic_quantizers": 1, "vector_quantization_hidden_dimension": 16,
    "upsample_groups": 32,
}  # fmt: skip
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}


@dataclass(frozen=True)
class Speech:
    """A model and how it is called.

    Attributes:
        model: whose `generate` makes frames.
        decoder: its depth decoder.
        depth: codes of a frame that it generates.
        call: (sampled) -> codes `[B, frames, books]` or `[B, books, frames]`.
        frame: (rows) -> arguments of `generate` of the decoder, for one frame.
    """

    model: Any
    decoder: Any
    depth: int
    call: Callable[[bool], Tensor]
    frame: Callable[[int], dict[str, Any]]


def fill(model: Any, spread: float) -> None:
    """Random weights; some of these classes leave theirs as memory has them.

    Args:
        model: whose matrices are drawn.
        spread: their standard deviation, by which scores differ.
    """
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, spread, generator=generator)


def make_csm() -> Speech:
    from transformers import CsmConfig, CsmForConditionalGeneration

    depth = 8
    sizes = {**LAYERS, "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": CODES}
    config = CsmConfig(
        num_codebooks=depth, text_vocab_size=50, **sizes, max_position_embeddings=64,
        codebook_pad_token_id=30, codebook_eos_token_id=0, bos_token_id=1, eos_token_id=None,
        pad_token_id=49, audio_token_id=48, audio_eos_token_id=47,
        depth_decoder_config={
            "num_codebooks": depth, "backbone_hidden_size": 32, "max_position_embeddings": 9,
            **sizes,
        },
        codec_config={**MIMI, "num_quantizers": depth},
    )  # fmt: skip
    model = CsmForConditionalGeneration(config).eval()
    fill(model, 0.2)
    ids = torch.tensor([[5, 7, 3], [9, 2, 6], [4, 4, 8]])

    def call(sampled: bool) -> Tensor:
        options = {"do_sample": sampled, "depth_decoder_do_sample": sampled}
        return model.generate(input_ids=ids, max_new_tokens=5, **options)

    def frame(rows: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(1)
        first = torch.randint(CODES, (rows, 1), generator=generator)
        return {
            "input_ids": torch.cat([torch.zeros_like(first), first], 1),
            "backbone_last_hidden_state": torch.randn(rows, 32, generator=generator),
            "min_new_tokens": depth - 1,
            "max_new_tokens": depth - 1,
        }

    return Speech(model, model.depth_decoder, depth - 1, call, frame)


def make_moshi(window: int = 8) -> Speech:
    from transformers import MoshiConfig, MoshiForConditionalGeneration

    depth = 6
    sizes = {**LAYERS, "num_key_value_heads": 4, "ffn_dim": 64, "vocab_size": 60}
    config = MoshiConfig(
        **sizes, max_position_embeddings=64, sliding_window=64, audio_vocab_size=CODES,
        num_codebooks=depth, audio_encoder_config={**MIMI, "num_quantizers": depth},
        depth_decoder_config={
            **sizes, "input_size": 32, "audio_vocab_size": CODES, "num_codebooks": depth,
            "sliding_window": window, "max_position_embeddings": depth + 1,
        },
    )  # fmt: skip
    model = MoshiForConditionalGeneration(config).eval()
    fill(model, 0.2)
    silence = model.get_unconditional_inputs(num_samples=2)

    def call(sampled: bool) -> Tensor:
        made = model.generate(
            input_ids=silence.input_ids,
            user_audio_codes=silence.user_audio_codes,
            moshi_audio_codes=silence.moshi_audio_codes,
            attention_mask=silence.attention_mask,
            max_new_tokens=5,
            do_sample=sampled,
            depth_decoder_do_sample=sampled,
            return_audio_waveforms=False,
            return_audio_codes=True,
        )
        return made.audio_codes

    def frame(rows: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(1)
        return {
            "input_ids": torch.randint(60, (rows, 1), generator=generator),
            "last_hidden_state": torch.randn(rows, 1, 32, generator=generator),
            "min_length": depth + 1,
            "max_length": depth + 1,
        }

    return Speech(model, model.depth_decoder, depth, call, frame)


def make_talker() -> Speech:
    from transformers import Qwen3OmniMoeTalkerForConditionalGeneration
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
        Qwen3OmniMoeTalkerConfig,
    )

    depth = 6
    sizes = {**LAYERS, "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": CODES}
    config = Qwen3OmniMoeTalkerConfig(
        code_predictor_config={**sizes, "head_dim": 8, "num_code_groups": depth + 1},
        text_config={
            **sizes, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "rope_parameters": {
                "rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0,
            },
        },
        num_code_groups=depth + 1,
        thinker_hidden_size=32,
        spatial_merge_size=2,  # read from here, and set by no default
    )  # fmt: skip
    model = Qwen3OmniMoeTalkerForConditionalGeneration(config).eval()
    fill(model, 0.2)
    return wrap_talker(model, depth)


def wrap_talker(model: Any, depth: int) -> Speech:
    """Calls of a talker."""
    generator = torch.Generator().manual_seed(2)
    prompt = torch.randn(2, 4, 32, generator=generator)

    def call(sampled: bool) -> Tensor:
        made = model.generate(
            inputs_embeds=prompt,
            trailing_text_hidden=prompt[:, :2],
            tts_pad_embed=prompt[:1, :1],
            max_new_tokens=5,
            do_sample=sampled,
            output_hidden_states=True,
            return_dict_in_generate=True,
        )
        return torch.stack([step[-1] for step in made.hidden_states if step[-1] is not None], 1)

    def frame(rows: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(1)
        return {
            "inputs_embeds": torch.randn(rows, 2, 32, generator=generator),
            "max_new_tokens": depth,
        }

    return Speech(model, model.code_predictor, depth, call, frame)


def make_tts() -> Speech:
    """Qwen3-TTS's talker: the published package needs transformers 4.57, so its classes are made of
    Qwen3-Omni's, under the published names. The code predictor is narrower than the talker."""
    import transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe as omni

    narrow = 24

    class Predictor(omni.Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration):
        def __init__(self, config: Any, width: int) -> None:
            super().__init__(config)
            tables = [torch.nn.Embedding(CODES, width) for _ in self.lm_head]
            self.model.codec_embedding = torch.nn.ModuleList(tables)
            self.small_to_mtp_projection = torch.nn.Linear(width, config.hidden_size)

        def forward(
            self, input_ids: Any = None, inputs_embeds: Any = None, generation_steps: int = 0,
            **options: Any,
        ) -> Any:  # fmt: skip
            if inputs_embeds is not None and inputs_embeds.shape[1] > 1:
                generation_steps = 0
            else:
                inputs_embeds = self.get_input_embeddings()[generation_steps - 1](input_ids)
            narrowed = self.small_to_mtp_projection(inputs_embeds)
            made = self.model(inputs_embeds=narrowed, **options)
            return omni.Qwen3OmniMoeTalkerCodePredictorOutputWithPast(
                logits=self.lm_head[generation_steps](made.last_hidden_state),
                hidden_states=(inputs_embeds,),  # Qwen3-Omni's talker reads codes from here
                generation_steps=generation_steps + 1,
                **{CACHE: made[CACHE]},
            )

    class Qwen3TTSTalkerForConditionalGeneration(omni.Qwen3OmniMoeTalkerForConditionalGeneration):
        __module__ = "qwen_tts.core.models.modeling_qwen3_tts"

    plain = make_talker()
    config = plain.model.config
    config.code_predictor_config.hidden_size = narrow
    config.code_predictor_config.model_type = "qwen3_tts_talker_code_predictor"
    model = Qwen3TTSTalkerForConditionalGeneration(config).eval()
    model.code_predictor = Predictor(config.code_predictor_config, LAYERS["hidden_size"]).eval()
    fill(model, 0.2)
    return wrap_talker(model, plain.depth)


MODELS = {
    "csm": make_csm,
    "moshi": make_moshi,
    "qwen3-omni talker": make_talker,
    "qwen3-tts talker": make_tts,
}
