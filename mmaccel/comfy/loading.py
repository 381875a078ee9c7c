"""Loading models: the node of each pipeline, and the cache that all of them share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

from mmaccel.catalog import IMAGE_MODELS, MODELS, SPEECH_MODELS
from mmaccel.comfy.table import (
    ANIMATOR,
    MODEL,
    PREFIX,
    SPEAKER,
    TEXT_TO_VIDEO,
    VISION,
    Host,
    NodeResult,
    NodeSpec,
    Output,
    Widget,
)
from mmaccel.comfy.widgets import load_widgets
from mmaccel.errors import OptionError
from mmaccel.pipelines.image_to_text.loading import DEMO, check_model, find_vision_source
from mmaccel.pipelines.image_to_text.pipeline import ImageToText
from mmaccel.pipelines.image_to_video.pipeline import ImageToVideo
from mmaccel.pipelines.image_to_video.registry import CODEC, TEXT_ENCODER
from mmaccel.pipelines.loading.checkpoint import LoadConfig
from mmaccel.pipelines.loading.hub import is_hub_id
from mmaccel.pipelines.loading.placement import AUTO, choose_dtype, choose_placement, name_dtype
from mmaccel.pipelines.loading.sources import content_files, find_model
from mmaccel.pipelines.runner.engine import Engine, UseGraphs
from mmaccel.pipelines.text_to_image.pipeline import TextToImage
from mmaccel.pipelines.text_to_image.registry import find_source
from mmaccel.pipelines.text_to_speech.pipeline import TextToSpeech
from mmaccel.pipelines.text_to_speech.registry import CODECS
from mmaccel.pipelines.text_to_speech.registry import DEMO as DEMO_VOICES
from mmaccel.pipelines.text_to_speech.registry import find_source as find_speech_source
from mmaccel.pipelines.text_to_video.pipeline import TextToVideo
from mmaccel.pipelines.text_to_video.registry import DEMO as DEMO_CLIPS
from mmaccel.pipelines.text_to_video.registry import FAMILIES as CLIP_FAMILIES
from mmaccel.pipelines.text_to_video.registry import check_clips, find_clips

_MEMORY_PER_BYTE = 2  # files of 16 bits may be read as 32, and passes need memory too
_SIDE = 16384  # pixels; no model draws more
_FOLDERS = ("codec", "text_encoder")  # widgets that name a folder or an id beside the model's
_HUB = "an id of the Hugging Face hub such as owner/name, which is downloaded."


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A loaded model, with its codec or processor.

    Attributes:
        name: as it was asked for.
        dtype: of the token model, as results name it.
        pipe: a `TextToImage`, `TextToSpeech`, `TextToVideo`, `ImageToVideo` or `ImageToText`.
    """

    name: str
    dtype: str
    pipe: Any


@dataclass(frozen=True)
class Wanted:
    """A model that is asked for.

    Attributes:
        pipeline: class whose `from_pretrained` loads it.
        model: its name.
        options: further arguments of `from_pretrained`, device and dtype among them.
        files: what it is loaded from.
    """

    pipeline: Any
    model: str
    options: Mapping[str, Any]
    files: Sequence[Path]

    @property
    def key(self) -> Hashable:
        """Equal for models that may be the same object."""
        options = sorted(self.options.items())
        return (self.pipeline, self.model, *options, describe_files(self.files))

    def load(self) -> LoadedModel:
        """Load it.

        Raises:
            OptionError: see `from_pretrained`.
            UnsupportedModelError: see `from_pretrained`.
        """
        pipe = self.pipeline.from_pretrained(self.model, **self.options)
        return LoadedModel(self.model, name_dtype(self.options["dtype"]), pipe)


class ModelCache:
    """Loaded models by what they were loaded with, held weakly.

    The same model is loaded once. ComfyUI's cache of outputs holds it, so freeing that cache frees
    the memory.
    """

    def __init__(self) -> None:
        self._models: WeakValueDictionary[Hashable, LoadedModel] = WeakValueDictionary()
        self._lock = Lock()

    def find(self, wanted: Wanted, host: Host) -> LoadedModel:
        """A cached model, or one that is loaded now.

        Args:
            wanted: the model.
            host: asked for interrupts and to free memory before a model is loaded.
        """
        with self._lock:
            key = wanted.key
            found = self._models.get(key)
            if found is None:
                host.check_interrupt()  # a download may have taken long
                gc.collect()  # a model that nobody holds any more may be part of a cycle
                size = sum(file.stat().st_size for file in wanted.files)
                host.free_memory(_MEMORY_PER_BYTE * size, wanted.options["device"])
                found = wanted.load()
                self._models[key] = found
        return found

    def __len__(self) -> int:
        """Models that somebody holds."""
        return len(self._models)

    def __iter__(self) -> Iterator[LoadedModel]:
        """Models that somebody holds."""
        return iter(list(self._models.values()))


CACHE = ModelCache()


def describe_files(files: Sequence[Path]) -> str:
    """Names, sizes and times of files: the text changes when a file is replaced."""
    facts = [(f.as_posix(), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return repr(sorted(facts))


def check_engine(device: str, dtype: str, cuda_graphs: UseGraphs) -> None:
    """Refuse a device that does not exist, or that cannot do what is asked.

    What "auto" is, only the running node asks, because starting a GPU takes a while.

    Raises:
        OptionError: no such device or dtype.
        MissingBackendError: CUDA graphs on a CPU.
    """
    if device == AUTO:
        choose_dtype(dtype)
    else:
        choose_placement(device, dtype)
        Engine(cuda_graphs).check(device)


@dataclass(frozen=True)
class Loader:
    """A node that loads a model.

    Attributes:
        word: of the node's id and title; empty for images.
        title: words of the title before "Model".
        summary: what it loads.
        output: the socket for the loaded model.
        pipeline: class whose `from_pretrained` loads it.
        part: the part of the model that the dtype applies to.
        model: its first widget.
        find: the model's source by its name; downloads.
        check_source: refuses a name that is no hub id, before anything is loaded.
        families: how its checkpoints may be read.
        parts: widgets before those of device and dtype.
        shape: widgets after them.
        later: widgets after all others, so that graphs that were saved before keep their order.
        folder: where the page lists it; empty for `word` in lower case.
    """

    word: str
    title: str
    summary: str
    output: Output
    pipeline: Any
    part: str
    model: Widget
    find: Callable[[str], Path]
    check_source: Callable[[str], Any]
    families: tuple[str, ...] = ()
    parts: tuple[Widget, ...] = ()
    shape: tuple[Widget, ...] = ()
    later: tuple[Widget, ...] = ()
    folder: str = ""

    def node(self) -> NodeSpec:
        """The node."""
        options = load_widgets(self.part, self.families)
        placement = (options.pop("device"), options.pop("dtype"))
        title = f"MMAccel Load {self.title} Model".replace("  ", " ")
        return NodeSpec(
            id=f"{PREFIX}Load{self.word}Model",
            title=title,
            summary=self.summary,
            inputs=(
                self.model,
                *self.parts,
                *placement,
                *self.shape,
                *options.values(),
                *self.later,
            ),
            outputs=(self.output,),
            run=self.run,
            check=self.check,
            fingerprint=self.fingerprint,
            folder=self.folder or self.word.lower(),
        )

    def run(self, host: Host, *, model: str, device: str, dtype: str, **values: Any) -> NodeResult:
        """Load a model, or return it from the cache.

        Args:
            host: says what device "auto" is.
            model, device, dtype: of the widgets.
            **values: of the others.

        Raises:
            OptionError: no such model, device or size; a file is missing.
            UnsupportedModelError: files of no known model.
        """
        files = self.files(model, **values)
        device, kind = choose_placement(host.device() if device == AUTO else device, dtype)
        options = {"device": device, "dtype": kind, **_read_parts(values)}
        return NodeResult((CACHE.find(Wanted(self.pipeline, model, options, files), host),))

    def check(
        self, *, model: str, device: str, dtype: str, cuda_graphs: UseGraphs, **values: Any
    ) -> None:
        """Check what can be checked before anything is loaded.

        Raises:
            OptionError: no such file or device, or a size of one side only.
            UnsupportedModelError: a folder with another kind of model.
            MissingBackendError: CUDA graphs on a CPU.
        """
        if not is_hub_id(model):
            self.check_source(model)
        _check_parts(values)
        check_engine(device, dtype, cuda_graphs)

    def fingerprint(self, *, model: str, **values: Any) -> str:
        """A text that changes when the files of a model change; empty where they are on the hub."""
        named = [model, *(values[part] for part in _FOLDERS if values.get(part))]
        if any(is_hub_id(name) and not Path(name).exists() for name in named):
            return ""
        return describe_files(self.files(model, **values))

    def files(self, model: str, *, decoder: str = "", **others: Any) -> list[Path]:
        """What a model is loaded from; default parts are on the hub."""
        source = self.find(model)
        files = content_files(source, Path(decoder) if decoder else None) if source.exists() else []
        for part in _FOLDERS:
            if others.get(part):
                files += content_files(find_model(others[part], {}, part))
        return files


def _check_parts(values: Mapping[str, Any]) -> None:
    """Check the widgets of a model's parts and of its size.

    Raises:
        OptionError: a file that is not there, or a size of one side only.
    """
    for part in _FOLDERS:
        given = values.get(part)
        if given and not is_hub_id(given):
            find_model(given, {}, part)
    if values.get("decoder"):
        LoadConfig(decoder=Path(values["decoder"]))
    width = values.get("width")
    height = values.get("height")
    if (width is None) != (height is None):
        raise OptionError(
            f"width, height: expected both or neither, received {width or 0} and {height or 0}; "
            "0 and 0 take the model's own size"
        )


def _read_parts(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of widgets as arguments of `from_pretrained`."""
    options = dict(values)
    for part in (*_FOLDERS, "decoder"):
        if part in options:
            options[part] = options[part] or None
    if "width" in options:
        size = (options.pop("width"), options.pop("height"))
        options["size"] = None if None in size else size
    return options


def _size(name: str) -> Widget:
    note = f"Pixels, for models that draw several sizes. 0 takes the model's own {name}."
    return Widget(name, "int", 0, note, 0, _SIDE, 1, stands_for=((0, None),))


def _codec(makes: str, published: str) -> Widget:
    note = f"What turns {makes}: a folder or an id of the hub. Empty takes the one its authors "
    return Widget("codec", "path", "", f"{note}published ({published}).")


def _name(default: str, more: str = "") -> Widget:
    return Widget("model", "path", default, f"{more or 'A folder,'} or {_HUB}")


def _find_own(name: str) -> Path:
    return find_model(name, {})


LOADERS = {
    each.word: each
    for each in (
        Loader(
            word="",
            title="",
            summary="Loads a model that generates images token by token, and keeps it while it is "
            "in use.",
            output=Output("model", MODEL, "The loaded model."),
            pipeline=TextToImage,
            part="generator",
            model=_name(
                next(iter(MODELS)),
                f"A model that ships with mmaccel ({', '.join(MODELS)}), a folder or file,",
            ),
            find=find_source,
            check_source=find_source,
            families=tuple(IMAGE_MODELS),
            shape=(
                _size("width"),
                _size("height"),
                Widget(
                    "decoder",
                    "path",
                    "",
                    "A file with the image decoder, for checkpoints without.",
                    is_advanced=True,
                ),
            ),
        ),
        Loader(
            word="Speech",
            title="Speech",
            summary="Loads a model that speaks token by token, with its codec, and keeps both "
            "while they are in use.",
            output=Output("speech_model", SPEAKER, "The loaded model."),
            pipeline=TextToSpeech,
            part="language model",
            model=_name(DEMO_VOICES, f"{DEMO_VOICES}, which ships with mmaccel, a folder"),
            find=find_speech_source,
            check_source=find_speech_source,
            families=tuple(SPEECH_MODELS),
            parts=(_codec("codes into sound", ", ".join(CODECS.values())),),
        ),
        Loader(
            word="Video",
            title="Video",
            summary="Loads a model that continues images and clips token by token, with its codec, "
            "and keeps both while they are in use.",
            output=Output("video_model", ANIMATOR, "The loaded model."),
            pipeline=ImageToVideo,
            part="model",
            model=_name("nvidia/Cosmos-Predict1-4B"),
            find=_find_own,
            check_source=_find_own,
            parts=(_codec("tokens into frames", CODEC),),
            later=(
                Widget(
                    "text_encoder",
                    "path",
                    "",
                    "The T5 of a model that reads a prompt: a folder or an id of the hub. Empty "
                    f"takes its authors' ({TEXT_ENCODER}).",
                    is_optional=True,
                ),
            ),
        ),
        Loader(
            word="TextToVideo",
            title="Text-to-Video",
            summary="Loads a model that makes clips from prompts token by token, and keeps it "
            "while it is in use.",
            output=Output("text_to_video_model", TEXT_TO_VIDEO, "The loaded model."),
            pipeline=TextToVideo,
            part="generator",
            model=_name(DEMO_CLIPS, f"{DEMO_CLIPS}, which ships with mmaccel, a folder"),
            find=find_clips,
            check_source=check_clips,
            families=CLIP_FAMILIES,
            folder="video",
        ),
        Loader(
            word="Vision",
            title="Vision-Language",
            summary="Loads a model that answers questions about images, with its processor, and "
            "keeps both while they are in use.",
            output=Output("vision_model", VISION, "The loaded model."),
            pipeline=ImageToText,
            part="model",
            model=_name(
                DEMO, f"{DEMO}, which ships with mmaccel, a folder with model and processor,"
            ),
            find=find_vision_source,
            check_source=check_model,
        ),
    )
}
