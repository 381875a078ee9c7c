"""Opening models: where they run, where they come from, what is in their folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.loading.placement import choose_dtype, choose_placement, find_main_device
from mmaccel.pipelines.loading.tasks import check_task
from mmaccel.pipelines.text_to_image.registry import find_image_family
from tests.messages.case import Refused


def _in_folder(act: Callable[[Path], Any], **files: Any) -> Callable[[], Any]:
    """A call with a folder of these files; their names end in .json, whose dots are left out."""

    def call() -> None:
        with TemporaryDirectory() as folder:
            for name, content in files.items():
                (Path(folder) / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
            act(Path(folder))

    return call


def _find(folder: Path) -> str:
    return find_image_family(folder, "own/x")


def _find_gguf(folder: Path) -> str:
    (folder / "model.gguf").touch()
    return find_image_family(folder / "model.gguf", "own/x")


_LOOKALIKES: dict[str, tuple[dict[str, Any], str]] = {
    "Janus-Pro in DeepSeek's layout": (
        {"model_type": "multi_modality"},
        "deepseek-community/Janus-Pro-1B",
    ),
    "Emu3 in BAAI's layout": ({"model_type": "Emu3", "vocab_size": 184622}, "BAAI/Emu3-Gen-hf"),
}
_NO_DRAWERS = {
    "an adapter": (
        _in_folder(_find, adapter_config={}),
        ("an adapter of peft; load its base model",),
    ),
    "a language model": (
        _in_folder(_find, config={"model_type": "llama"}),
        ("if llama generates text", "mmaccel.attach"),
    ),
    "a GGUF file": (_in_folder(_find_gguf), ("a GGUF file is read by transformers",)),
    "a model of no family": (
        _in_folder(_find, config={"model_type": "bert"}),
        ("words.json, config.json of janus",),
    ),
}

CASES = (
    *(
        Refused(
            f"the dtype {dtype!r}",
            partial(choose_dtype, dtype),
            says=("dtype", "auto, float32, bfloat16"),
        )
        for dtype in ("int8", torch.int64, None)
    ),
    *(
        Refused(
            f"the map {device_map!r}",
            partial(find_main_device, device_map),
            says=("device_map", "auto, balanced"),
        )
        for device_map in ({}, {"a": None})
    ),
    *(
        Refused(
            name,
            _in_folder(_find, config=config),
            says=(said,),
            error=UnsupportedModelError,
        )
        for name, (config, said) in _LOOKALIKES.items()
    ),
    *(
        Refused(name, call, says, UnsupportedModelError)
        for name, (call, says) in _NO_DRAWERS.items()
    ),
    Refused(
        "a device that is not there",
        lambda: choose_placement("cuda:99"),
        says=("'cuda:99'", "auto takes "),
    ),
    Refused(
        "a model that answers, to draw",
        _in_folder(
            lambda folder: check_task(folder, "generate"),
            config={"model_type": "llava", "vision_config": {}},
        ),
        says=("answers questions about images",),
    ),
)
