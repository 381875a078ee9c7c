"""What `attach` refuses, and remedies that are carried out here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmaccel
from mmaccel import UnsupportedModelError
from tests.fixtures.tiny_lms import build_lm, falls_back, left_padded
from tests.fixtures.tiny_vlms import build_vlm

PROMPTS = left_padded([[5, 6], [4, 5, 6, 7]])


def test_a_depth_decoder_without_weights() -> None:
    import transformers as hf

    small = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    with torch.device("meta"):
        config = hf.CsmConfig(**small, depth_decoder_config=small)
        model = hf.CsmForConditionalGeneration(config)
    assert "meta device" in mmaccel.supports(model).reason


def _pocket_tts() -> tuple[Any, dict[str, Any]]:
    """Pocket TTS and a call of it: its frames are drawn by a flow."""
    import transformers as hf

    config = hf.PocketTTSConfig(
        vocab_size=44, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=32, latent_dim=8, max_position_embeddings=64, audio_prompt_token_id=40,
        audio_latent_token_id=41, audio_prompt_bos_token_id=42, audio_bos_token_id=43,
        flow_head_config=dict(
            hidden_size=16, num_hidden_layers=1, latent_dim=8, condition_dim=32,
            frequency_embedding_size=8,
        ),
    )  # fmt: skip
    call = {"input_ids": torch.tensor([[5, 6, 43]]), "max_new_tokens": 3}
    return hf.PocketTTSForConditionalGeneration(config).eval(), call


def test_frames_of_latents_are_made_by_the_models_own_loop() -> None:
    torch.manual_seed(0)
    model, call = _pocket_tts()
    with pytest.raises(UnsupportedModelError, match="frames of sound are continuous latents"):
        mmaccel.attach(model, "jacobi", strict=True)

    def generate() -> list[Any]:
        torch.manual_seed(3)
        return list(model.generate(**call))

    plain = generate()
    with falls_back(model, "docs/speech.md", kv_cache="snapkv") as handle:
        made = generate()
    for one, own in zip(made, plain, strict=True):
        assert one is own is None or torch.equal(one, own)
    stats = handle.stats
    assert stats is not None and stats.tokens == 0 and stats.passes >= call["max_new_tokens"]


def test_a_model_without_its_head(tmp_path: Any) -> None:
    """The remedy: load it with AutoModelForCausalLM."""
    from transformers import AutoModelForCausalLM

    model = build_lm("llama")
    assert "AutoModelForCausalLM.from_pretrained" in mmaccel.supports(model.model).reason
    model.model.save_pretrained(tmp_path)
    assert mmaccel.supports(AutoModelForCausalLM.from_pretrained(tmp_path).eval())


def _denoiser() -> Any:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def _qwen_image() -> Any:
    import diffusers

    return diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=None,
        text_encoder=build_vlm("qwen2_5_vl"), tokenizer=None, transformer=_denoiser(),
    )  # fmt: skip


@pytest.mark.slow  # imports of diffusers
def test_a_text_encoder_is_no_generator() -> None:
    pipe = _qwen_image()
    found = mmaccel.supports(pipe)
    assert not found and type(pipe).__name__ in found.reason
    assert "enable_cache(...)" in found.reason and "cache-dit" in found.reason
    with pytest.raises(UnsupportedModelError, match="enable_cache"):
        mmaccel.attach(pipe, "jacobi")
    assert "_mmaccel" not in str(vars(pipe.text_encoder).keys())


def test_a_callers_own_pipeline_of_diffusers_parts() -> None:
    """No table can name it: the one component that generates is what it is for."""
    import diffusers

    class Writer(diffusers.DiffusionPipeline):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.register_modules(model=model)

    assert mmaccel.supports(Writer(build_lm("llama"))).family == "causal_lm"


def test_a_pipeline_of_transformers() -> None:
    import transformers

    model = build_lm("llama")
    pipe = transformers.TextGenerationPipeline(model=model, tokenizer=_Words())
    assert mmaccel.supports(pipe).family == "causal_lm"
    with mmaccel.attach(pipe, mmaccel.Jacobi(4), strict=True) as run:
        pipe("5 6 7", max_new_tokens=6, do_sample=False)
        assert run.stats is not None and run.stats.tokens > 0
        assert mmaccel.detach(pipe) and not mmaccel.detach(model)


class _Words:
    """What the pipeline asks of a tokenizer: ids written as numbers."""

    padding_side, pad_token_id, eos_token_id, chat_template = "left", 0, None, None
    model_input_names = ("input_ids",)

    def __call__(self, text: str, **_: Any) -> Any:
        from transformers import BatchEncoding

        return BatchEncoding({"input_ids": torch.tensor([[int(word) for word in text.split()]])})

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(map(str, torch.as_tensor(ids).tolist()))
