"""Opening models: where they run, where they come from, what is in their folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from mmaccel import TextToImage
from mmaccel.errors import UnsupportedModelError
from mmaccel.outputs.video_files import pick_format
from mmaccel.outputs.whole_files import write_whole
from mmaccel.pipelines.loading.hub import HubOptions
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
    "an empty folder": (_in_folder(_find), ("give the folder with its config.json",)),
    "a model of no family": (
        _in_folder(_find, config={"model_type": "bert"}),
        ("words.json, config.json of janus",),
    ),
    "a pipeline of diffusers": (
        _in_folder(_find, config={}, model_index={"_class_name": "FluxPipeline"}),
        ("a 'FluxPipeline' of diffusers",),
    ),
}

CASES = (
    *(
        Refused(
            f"the dtype {dtype!r}",
            partial(choose_dtype, dtype),
            says=("dtype", "auto, float32, bfloat16"),
        )
        for dtype in ("int8", "float8_e4m3fn", torch.int64, 16, None, "", "autos")
    ),
    *(
        Refused(
            f"the map {device_map!r}",
            partial(find_main_device, device_map),
            says=("device_map", "auto, balanced"),
        )
        for device_map in ({}, 1.5, True, ["cpu"], {"a": None})
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
    *(
        Refused(
            f"a file called {name}",
            partial(write_whole, Path(name), lambda path: None),
            says=("file", "a file name"),
        )
        for name in (".", "/", "-", "..")
    ),
    Refused(
        "a device that is not there",
        lambda: choose_placement("cuda:99"),
        says=("'cuda:99'", "auto takes "),
    ),
    Refused(
        "a device beside a map",
        lambda: TextToImage.from_pretrained("scenes", device="cpu", device_map="auto"),
        says=("device", "none with a device_map"),
    ),
    Refused(
        "a revision by number",
        lambda: HubOptions(revision=7),  # type: ignore[arg-type]
        says=("revision", "a text or None", "7"),
    ),
    Refused(
        "a model that answers, to draw",
        _in_folder(
            lambda folder: check_task(folder, "generate"),
            config={"model_type": "llava", "vision_config": {}},
        ),
        says=("answers questions about images",),
    ),
    Refused(
        "trust by a word",
        lambda: TextToImage.from_pretrained("scenes", trust_remote_code="no"),  # type: ignore
        says=("trust_remote_code", "one of False, True"),
    ),
    Refused(
        "a format of clips",
        lambda: pick_format("avi"),
        says=("--format", "one of mp4, webp, gif", "'avi'"),
    ),
)
