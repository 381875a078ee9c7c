"""Opening models: names, sizes, places and precisions, and models of another kind.

Folders that are spoilt: tests/loading/test_spoilt_folders.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mmaccel
from mmaccel import ImageToVideo, TextToImage, TextToSpeech, TextToVideo
from mmaccel.comfy.nodes import NODES
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.loading.placement import find_main_device
from tests.fixtures.checkpoints import SIZES
from tests.fixtures.shared import image_folder, media_folders, new_folder
from tests.fixtures.tiny_model import build_tiny_clips
from tests.messages.refused import Refused, table

Call = Callable[..., Any]
_NO = UnsupportedModelError


def open_images(family: str) -> Call:
    """One model; a `name` stands in its place."""

    def call(name: Any = None, **options: Any) -> Any:
        folder = name or image_folder(family)
        return TextToImage.from_pretrained(folder, **{"size": SIZES.get(family)} | options)

    return call


def open_other() -> Call:
    return lambda pipeline, name: pipeline.from_pretrained(name() if callable(name) else name)


def open_kind() -> Call:
    """Images by a folder of a configuration, or by a file."""

    def call(config: dict[str, Any], file: str = "config.json") -> Any:
        path = new_folder("kind") / file
        path.write_text(json.dumps(config), encoding="utf-8")
        return TextToImage.from_pretrained(path if file == "model.gguf" else path.parent)

    return call


def speak_with_codec() -> Call:
    """A name, or the model's own."""
    model, own = media_folders("llasa")
    return lambda codec: TextToSpeech.from_pretrained(model, codec=codec or own)


def choose_device() -> Call:
    return find_main_device


def load_demo() -> Call:
    return mmaccel.load_demo


def use_node() -> Call:
    """The fields of a node's widgets."""
    return lambda node, **fields: NODES[f"MMAccel{node}"].read(fields)


def _clips() -> Path:
    return build_tiny_clips(new_folder("clips"))


CASES: list[Refused] = [
    *table(
        open_images,
        ({"name": "no-such"}, "model: expected a folder … 'no-such'", {"name": None}),
        ({"name": "scene"}, "did you mean scenes?", {"name": "scenes"}),
        ({"family": "janos"}, "family: expected one of words, masked-words, scale-words",
         {"family": "words"}),
        ({"dtype": "int8"}, "dtype: expected auto, float32, bfloat16", {"dtype": "bf16"}),
        ({"device": "cuda:99"}, "'cuda:99' … auto takes ", {"device": "auto"}),
        of="words",
    ),
    *table(
        open_images,
        ({"size": (30, 32)}, "multiples of 8, received 30x32", {"size": (32, 32)}),
        ({"size": 64}, "size: expected a list, received 64", {"size": (64, 64)}),
        of="emu3",
    ),
    *table(
        open_images,
        ({"size": (512, 512)}, "size: expected 16x16, the only one", {"size": None}),
        ({"decoder": __file__}, "decoder: expected none for janus", {"decoder": None}),
        of="janus",
    ),
    *table(
        open_images,
        ({"size": (64, 32)}, "size: expected a square", {"size": (64, 64)}),
        ({"decoder": "/no/such.pt"}, "decoder: expected a file", {"decoder": None}),
        of="llamagen-c2i",
    ),
    *table(
        open_images,
        ({"size": (96, 64)}, "size: expected sides the model has a token for",
         {"size": SIZES["lumina-mgpt"]}),
        of="lumina-mgpt",
    ),
    *table(
        open_other,
        *(
            ({"pipeline": pipeline, "name": "moving-scenes"},
             "which makes clips from prompts … mmaccel animate", None)
            for pipeline in (TextToImage, TextToSpeech, ImageToVideo)
        ),
        ({"pipeline": TextToVideo, "name": partial(image_folder, "words")},
         "makes clips from prompts (TextToVideo) … mmaccel generate", {"pipeline": TextToImage}),
        ({"pipeline": TextToImage, "name": _clips}, "which makes clips from prompts",
         {"pipeline": TextToVideo}),
    ),
    *table(
        open_kind,
        ({"config": {"model_type": "multi_modality"}}, "deepseek-community/Janus-Pro-1B", None),
        ({"config": {}, "file": "adapter_config.json"}, "adapter of peft; load its base", None),
        ({"config": {"model_type": "llama"}}, "if llama generates text … mmaccel.attach", None),
        ({"config": {"model_type": "bert"}}, "words.json, config.json of janus", None),
        ({"config": {}, "file": "model.gguf"}, "a GGUF file is read by transformers", None),
        error=_NO,
    ),
    *table(speak_with_codec,
           ({"codec": "none"}, "codec: expected a folder, a file, an id", {"codec": None})),
    *table(
        choose_device,
        ({"device_map": {}}, "device_map … auto, balanced", {"device_map": "auto"}),
    ),
    *table(
        load_demo,
        ({"name": "scenes"}, "scenes-vqa", {"name": "recall"}),
        ({"name": "scenes-vqa", "folder": "/nowhere"}, "scripts.training scenes-vqa",
         {"folder": None}),
    ),
    *table(
        use_node,
        ({"node": "LoadModel", "model": "none"}, "model: expected a folder … 'none'",
         {"model": "scenes"}),
        ({"node": "AdaptiveBlockPolicy", "delimiters": "x"}, "delimiters: expected a list",
         {"delimiters": "3"}),
    ),
]  # fmt: skip
