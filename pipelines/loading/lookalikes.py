"""Repositories that look like models we serve, but are not: what they are, and what helps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmaccel.errors import UnsupportedModelError

CONFIGS = ("config.json", "model_index.json", "adapter_config.json")

_SERVED = "Janus-Pro, Emu3, Chameleon, Lumina-mGPT, GLM-Image and LlamaGen are served"
_SERVED_PIPELINES = ("GlmImagePipeline", "AmusedPipeline")
_EMU35_WORDS = 200_000  # Emu3 has 184 622 words, Emu3.5 282 926


def refuse_lookalike(
    name: str, configs: Mapping[str, Mapping[str, Any]], option: str = "model"
) -> None:
    """Refuse a checkpoint that cannot run here, by what its configurations say.

    Args:
        name: of the checkpoint, given by the user.
        configs: content of those of `CONFIGS` that are there.
        option: name of the option in messages.

    Raises:
        UnsupportedModelError: what the checkpoint is, and what to take instead.
    """
    config = configs.get("config.json", {})
    if not config and "adapter_config.json" in configs:
        base = configs["adapter_config.json"].get("base_model_name_or_path")
        own = base if isinstance(base, str) and base else "its base model"
        raise UnsupportedModelError(
            f"{option}: expected a whole model, received {name}, an adapter of peft; load "
            f"{own[:200]} with transformers, add this with model.load_adapter(...), then "
            "mmaccel.attach(model, policy)"
        )
    found = _find(name, config, configs.get("model_index.json", {}).get("_class_name"))
    if found is not None:
        what, remedy = found
        raise UnsupportedModelError(
            f"{option}: expected a model that makes tokens, in files of transformers, received "
            f"{name}, {what}; {remedy}"
        )


def _find(name: str, config: Mapping[str, Any], pipeline: Any) -> tuple[str, str] | None:
    """What a look-alike is and what helps; None for other checkpoints."""
    if isinstance(pipeline, str) and pipeline not in _SERVED_PIPELINES:
        return (
            f"a {pipeline[:60]} of diffusers, which removes noise from a whole image at every step",
            "no policy applies to it; take one that makes tokens, such as "
            f"deepseek-community/Janus-Pro-1B ({_SERVED}, AmusedPipeline through mmaccel.attach)",
        )
    kind = config.get("model_type")
    if kind == "multi_modality":
        return (
            "in the layout of DeepSeek's own code",
            "take the copy for transformers: deepseek-community/Janus-Pro-1B or "
            "deepseek-community/Janus-Pro-7B",
        )
    words = config.get("vocab_size")
    if kind == "Emu3" and isinstance(words, int) and words > _EMU35_WORDS:
        return "Emu3.5, which is code of its own repository", f"it is not served; {_SERVED}"
    if kind == "Emu3":  # transformers' own has "emu3"
        return (
            "in the layout of Emu3's own code",
            "take the copy for transformers: BAAI/Emu3-Gen-hf",
        )
    if kind == "hunyuan_image_3_moe":
        return (
            "HunyuanImage-3, which makes images by flow matching inside a language model",
            f"no policy applies to it; {_SERVED}",
        )
    if str(kind).startswith("chameleon") and "mgpt-2" in name.lower():
        return (
            "Lumina-mGPT 2.0, whose image tokenizer is code of its own repository",
            "it is not served; Lumina-mGPT 1.0 is: Alpha-VLLM/Lumina-mGPT-7B-768",
        )
    return None
