"""Published checkpoints that are asked for and cannot run here: what to take instead."""

from __future__ import annotations

from pathlib import Path

from mmaccel.config_files import read_json, shorten
from mmaccel.errors import UnsupportedModelError

CONFIGS = ("config.json", "model_index.json", "adapter_config.json")
_COPIES = {  # of files that their authors' code alone reads, by model_type
    "multi_modality": "deepseek-community/Janus-Pro-1B or deepseek-community/Janus-Pro-7B",
    "Emu3": "BAAI/Emu3-Gen-hf",  # transformers' own has "emu3"
}
_SERVED = (None, "GlmImagePipeline", "AmusedPipeline")


def refuse_lookalike(name: str, folder: Path, option: str = "model") -> None:
    """Refuse, before weights, authors' own layouts, a denoiser of diffusers, or an adapter."""
    content = {file: read_json(folder / file, option, may_lack=True) for file in CONFIGS}
    kind = content["config.json"].get("model_type")
    if str(kind) in _COPIES:
        raise UnsupportedModelError(
            f"{option}: expected files for transformers, received {name} in the layout of its "
            f"authors' own code; take the copy {_COPIES[str(kind)]}"
        )
    pipeline = content["model_index.json"].get("_class_name")
    if pipeline not in _SERVED:
        raise UnsupportedModelError(
            f"{option}: expected a model that makes tokens, received {name}, a {shorten(pipeline)} "
            "of diffusers, to which no policy applies; take one such as "
            "deepseek-community/Janus-Pro-1B"
        )
    if (folder / "adapter_config.json").is_file() and not content["config.json"]:
        base = content["adapter_config.json"].get("base_model_name_or_path") or "its base model"
        raise UnsupportedModelError(
            f"{option}: expected a whole model, received {name}, an adapter of peft; load {base} "
            "with transformers, add this with model.load_adapter(...), then "
            "mmaccel.attach(model, policy)"
        )
