"""Loading models: the node of each pipeline, and the cache that all of them share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Sequence
from dataclasses import Field, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from mmaccel.catalog import IMAGE_MODELS, MODELS, SPEECH_MODELS, SPOKEN_MODELS
from mmaccel.comfy import host
from mmaccel.comfy.ports import (
    Node,
    Port,
    advanced,
    choice,
    field_port,
    number,
    reads,
    text,
    to_sentence,
    unquoted,
)
from mmaccel.limits import MAX_SIDE
from mmaccel.options import LoadOptions
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig
from mmaccel.pipelines.hosts.loading.hub import is_hub_id
from mmaccel.pipelines.hosts.loading.placement import AUTO, choose_placement, name_dtype
from mmaccel.pipelines.hosts.loading.sources import content_files, find_model
from mmaccel.pipelines.image_to_text import loading as vision
from mmaccel.pipelines.image_to_text.pipeline import ImageToText
from mmaccel.pipelines.image_to_video import registry as video
from mmaccel.pipelines.image_to_video.pipeline import ImageToVideo
from mmaccel.pipelines.text_to_image.pipeline import TextToImage
from mmaccel.pipelines.text_to_image.registry import find_source
from mmaccel.pipelines.text_to_speech import registry as speech
from mmaccel.pipelines.text_to_speech.pipeline import TextToSpeech
from mmaccel.pipelines.text_to_video import registry as clips
from mmaccel.pipelines.text_to_video.pipeline import TextToVideo
from mmaccel.results import EXACT_DTYPE

_MEMORY_PER_BYTE = 2  # files of 16 bits may be read as 32, and passes need memory too
_PARTS = ("codec", "text_encoder")  # widgets that name a folder or an id beside the model's
_HUB = "an id of the Hugging Face hub such as owner/name, which is downloaded."
_SAVED = {"device", "dtype", "family", "cuda_graphs", "fused"}  # others came later: optional, last
_NOT_HERE = {
    "trust_remote_code",  # a workflow comes from others too: it may not say whom to trust
    "revision",  # the cache of models knows the files of the branch that is downloaded by default
}
_SUGGESTED = {  # field -> what its widget offers; the library takes more, such as cuda:1 and bf16
    "device": (AUTO, "cpu", "cuda", "mps", "xpu"),
    "dtype": (AUTO, EXACT_DTYPE, "bfloat16", "float16"),
}
_NOTES = {  # field -> tooltip, where ComfyUI differs from the command line
    "device": "Where it runs; auto is where ComfyUI computes.",
    "family": "How the checkpoint is read; None finds out.",
    "dtype": f"Of the {{part}}. auto is bfloat16 on a GPU that computes it and {EXACT_DTYPE} on a "
    f"CPU. {EXACT_DTYPE} keeps every guarantee bit for bit, the others up to rounding.",
}


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A loaded model, with its codec or processor."""

    name: str
    dtype: str
    pipe: Any


CACHE: WeakValueDictionary[Hashable, LoadedModel] = WeakValueDictionary()
"""Loaded models by what they were loaded with: the same model is loaded once. ComfyUI's cache of
outputs holds them, so freeing that cache frees the memory."""


def _option_port(each: Field[Any], part: str, families: Sequence[str]) -> Port:
    name = each.name
    note = _NOTES.get(name, to_sentence(each.metadata["help"])).format(part=part)
    if name in _SUGGESTED:
        return choice(name, AUTO, note, _SUGGESTED[name], is_open=True)
    if each.type in ("Switch", "FusedSwitch"):
        default = AUTO if each.default == AUTO else "off"
        read = reads({"on": True, "off": False})
        port = choice(name, default, note, (AUTO, "on", "off"), read=read)
    else:
        port = field_port(each, note, families if name == "family" else ())
    return replace(advanced(port), is_optional=name not in _SAVED)


def _describe(files: Sequence[Path]) -> str:
    """Names, sizes and times of files: the text changes when a file is replaced."""
    facts = [(f.as_posix(), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return repr(sorted(facts))


def _load_node(
    id: str,
    title: str,
    category: str,
    summary: str,
    output: tuple[str, str],
    pipeline: Any,
    find: Callable[[str], Path],
    default: str,
    named: str,
    part: str = "model",
    families: Sequence[str] = (),
    parts: Sequence[Port] = (),
    shape: Sequence[Port] = (),
    later: Sequence[Port] = (),
) -> Node:
    """The node that loads a kind of models.

    `find` gives a model's source by the name in the first widget, and downloads; `named` is what
    that names beside ids of the hub; `families` are how checkpoints may be read. Widgets stand
    before device and dtype (`parts`), after them (`shape`), and after all others (`later`).
    """

    def files(*, model: str, decoder: str | None = None, **others: Any) -> list[Path]:
        source = find(model)
        more = LoadConfig(decoder=Path(decoder) if decoder else None).decoder
        found = content_files(source, more) if source.exists() else []
        for part in _PARTS:
            if others.get(part):  # a default part is on the hub
                found += content_files(find_model(others[part], {}, part))
        return found

    def fingerprint(**values: Any) -> str:
        named = [values[part] for part in ("model", *_PARTS) if values.get(part)]
        if any(is_hub_id(name) and not Path(name).exists() for name in named):
            return ""  # only asking the hub can tell
        return _describe(files(**values))

    def run(*, model: str, device: str, dtype: str, **values: Any) -> tuple[LoadedModel]:
        sources = files(model=model, **values)
        if "width" in values:
            size = values.pop("width"), values.pop("height")
            values["size"] = None if size == (None, None) else size
        device, kind = choose_placement(host.device() if device == AUTO else device, dtype)
        options = {**values, "device": device, "dtype": kind}
        key = (pipeline, model, *sorted(options.items()), _describe(sources))
        found = CACHE.get(key)
        if found is None:
            host.check_interrupt()  # a download may have taken long
            gc.collect()  # a model that nobody holds any more may be part of a cycle
            weights = sum(file.stat().st_size for file in sources)
            host.free_memory(_MEMORY_PER_BYTE * weights, device)
            pipe = pipeline.from_pretrained(model, **options)
            found = CACHE[key] = LoadedModel(model, name_dtype(kind), pipe)
        return (found,)

    device, dtype, *options = (
        _option_port(each, part, families)
        for each in fields(LoadOptions)
        if each.metadata.get("help") and each.name not in _NOT_HERE
        if families or each.name != "family"
    )
    first = text("model", default, f"{named} or {_HUB}", read=unquoted)
    return Node(
        f"MMAccel{id}",
        f"MMAccel {title}",
        category,
        summary,
        [first, *parts, device, dtype, *shape, *options, *later],
        [Port(*output, "The loaded model.")],
        run,
        check=fingerprint,
        fingerprint=fingerprint,
    )


def _size(name: str) -> Port:
    note = f"Pixels, for models that draw several sizes. 0 takes the model's own {name}."
    return number(name, 0, note, 0, MAX_SIDE, read=reads({0: None}))


def _codec(makes: str, published: str) -> Port:
    note = f"What turns {makes}: a folder or an id of the hub. Empty takes the one its authors "
    return text("codec", "", f"{note}published ({published}).", read=unquoted)


LOAD_IMAGES = _load_node(
    "LoadModel",
    "Load Model",
    "mmaccel",
    "Loads a model that generates images token by token, and keeps it while it is in use.",
    ("model", "MMACCEL_MODEL"),
    TextToImage,
    find_source,
    next(iter(MODELS)),
    f"A model that ships with mmaccel ({', '.join(MODELS)}), a folder or file,",
    "generator",
    tuple(IMAGE_MODELS),
    shape=(
        _size("width"),
        _size("height"),
        advanced(
            text(
                "decoder",
                "",
                "A file with the image decoder, for checkpoints without.",
                read=unquoted,
            )
        ),
    ),
)
LOAD_SPEECH = _load_node(
    "LoadSpeechModel",
    "Load Speech Model",
    "mmaccel/speech",
    "Loads a model that speaks token by token, with its codec, and keeps both while they are in "
    "use.",
    ("speech_model", "MMACCEL_SPEECH_MODEL"),
    TextToSpeech,
    speech.find_source,
    speech.DEMO,
    f"A model that ships with mmaccel ({', '.join(SPOKEN_MODELS)}), a folder",
    "language model",
    tuple(SPEECH_MODELS),
    parts=[_codec("codes into sound", ", ".join(speech.CODECS.values()))],
)
LOAD_VIDEO = _load_node(
    "LoadVideoModel",
    "Load Video Model",
    "mmaccel/video",
    "Loads a model that continues images and clips token by token, with its codec, and keeps both "
    "while they are in use.",
    ("video_model", "MMACCEL_VIDEO_MODEL"),
    ImageToVideo,
    partial(find_model, shipped={}),
    "nvidia/Cosmos-Predict1-4B",
    "A folder,",
    parts=[_codec("tokens into frames", video.CODEC)],
    later=[
        text(
            "text_encoder",
            "",
            "The T5 of a model that reads a prompt: a folder or an id of the hub. Empty takes its "
            f"authors' ({video.TEXT_ENCODER}).",
            read=unquoted,
            is_optional=True,
        ),
    ],
)
LOAD_TEXT_TO_VIDEO = _load_node(
    "LoadTextToVideoModel",
    "Load Text-to-Video Model",
    "mmaccel/video",
    "Loads a model that makes clips from prompts token by token, and keeps it while it is in use.",
    ("text_to_video_model", "MMACCEL_TEXT_TO_VIDEO_MODEL"),
    TextToVideo,
    clips.find_clips,
    clips.DEMO,
    f"{clips.DEMO}, which ships with mmaccel, a folder",
    "generator",
    clips.FAMILIES,
)
LOAD_VISION = _load_node(
    "LoadVisionModel",
    "Load Vision-Language Model",
    "mmaccel/vision",
    "Loads a model that answers questions about images, with its processor, and keeps both while "
    "they are in use.",
    ("vision_model", "MMACCEL_VISION_MODEL"),
    ImageToText,
    vision.find_vision_source,
    vision.DEMO,
    f"{vision.DEMO}, which ships with mmaccel, a folder with model and processor,",
)
