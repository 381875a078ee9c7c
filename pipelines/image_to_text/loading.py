"""Opens vision-language models: the embedded one by name, others by transformers' Auto classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmaccel.catalog import DEMO_WEIGHTS, VISION_DEMO, load
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.loading.checkpoint import (
    LoadConfig,
    load_config_file,
    load_model,
    load_processor,
    refuse_device_map,
)
from mmaccel.pipelines.hosts.loading.moving import move_module
from mmaccel.pipelines.hosts.loading.sources import find_model
from mmaccel.pipelines.hosts.loading.tasks import check_task

DEMO = "scenes-vqa"


def open_vision_language(name: str | Path, load_config: LoadConfig) -> tuple[Any, Any, Path]:
    """A vision-language model, its processor, and the path of its checkpoint."""
    if str(name) == DEMO:
        model, processor = load(VISION_DEMO)(DEMO)
        refuse_device_map(load_config, DEMO)
        move_module(model, load_config.device, load_config.dtype)
        return model, processor, Path(model.name_or_path)
    from transformers import AutoModelForImageTextToText, AutoProcessor

    check_task(name, "answer")
    source = find_model(name, {DEMO: find_vision_source(DEMO)}, hub=load_config)
    check_task(source, "answer")
    _check_kind(source, load_config)
    processor = load_processor(AutoProcessor, source, load_config)
    check_processor(processor, f"in {source}")
    return load_model(AutoModelForImageTextToText, source, load_config), processor, source


def find_vision_source(name: str | Path) -> Path:
    """Where a model's files are; a folder that may be missing for "scenes-vqa"."""
    if str(name) == DEMO:
        return DEMO_WEIGHTS / DEMO
    check_task(name, "answer")
    return find_model(name, {DEMO: find_vision_source(DEMO)})


def check_model(source: str | Path, trust_remote_code: bool = False) -> None:
    """Check what can be checked of a model without loading it."""
    check_task(source, "answer")
    if str(source) != DEMO:
        _check_kind(find_model(source, {}), LoadConfig(trust_remote_code=trust_remote_code))


def _check_kind(source: Path, load_config: LoadConfig) -> None:
    """A folder's model must read images and write text."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    config = load_config_file(source, load_config)
    is_own = "AutoModelForImageTextToText" in (getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not is_own:
        raise UnsupportedModelError(
            "model: expected a vision-language model of transformers, such as llava_next, "
            f"received {config.model_type} in {source}; docs/visual-tokens.md lists the classes"
        )


def check_processor(processor: Any, where: str = "") -> None:
    """A processor must take images and text."""
    parts = [name for name in ("image_processor", "tokenizer") if hasattr(processor, name)]
    if len(parts) < 2 or not callable(processor):
        raise UnsupportedModelError(
            f"processor: expected one with image_processor and tokenizer, received a "
            f"{type(processor).__name__} {where}".rstrip()
            + "; copy the folder again, with its processor files"
        )
