"""The node that loads an image model, and the cache of loaded models that all load nodes share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

from mmaccel.catalog import IMAGE_MODELS, MODELS
from mmaccel.comfy.table import MODEL, PREFIX, Host, NodeResult, NodeSpec, Output, Widget
from mmaccel.comfy.widgets import AUTO, CUDA_GRAPHS, FUSED, device_widgets
from mmaccel.errors import OptionError
from mmaccel.pipelines.loading.checkpoint import LoadConfig
from mmaccel.pipelines.loading.hub import is_hub_id
from mmaccel.pipelines.loading.placement import choose_dtype, choose_placement, name_dtype
from mmaccel.pipelines.loading.sources import content_files
from mmaccel.pipelines.runner.engine import Engine, UseGraphs
from mmaccel.pipelines.text_to_image.pipeline import TextToImage
from mmaccel.pipelines.text_to_image.registry import find_source

_MEMORY_PER_BYTE = 2  # files of 16 bits may be read as 32, and passes need memory too
_SIDE = 16384  # pixels; no model draws more


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A loaded model, with its codec or processor.

    Attributes:
        name: as it was asked for.
        dtype: of the token model, as results name it.
        pipe: a `TextToImage`, `TextToSpeech`, `ImageToVideo` or `ImageToText`.
    """

    name: str
    dtype: str
    pipe: Any


class ModelCache:
    """Loaded models by what they were loaded with, held weakly.

    The same model is loaded once. ComfyUI's cache of outputs holds it, so freeing that cache frees
    the memory.
    """

    def __init__(self) -> None:
        self._models: WeakValueDictionary[Hashable, LoadedModel] = WeakValueDictionary()
        self._lock = Lock()

    def find(
        self, key: Hashable, host: Host, device: str, files: Sequence[Path],
        load: Callable[[], LoadedModel],
    ) -> LoadedModel:  # fmt: skip
        """A cached model, or one that is loaded now.

        Args:
            key: what it is loaded with.
            host: asked for interrupts and to free memory before a model is loaded.
            device: where the model runs.
            files: what the model is loaded from.
            load: loads it.
        """
        with self._lock:
            found = self._models.get(key)
            if found is None:
                host.check_interrupt()  # a download may have taken long
                gc.collect()  # a model that nobody holds any more may be part of a cycle
                size = sum(file.stat().st_size for file in files)
                host.free_memory(_MEMORY_PER_BYTE * size, device)
                found = self._models[key] = load()
        return found

    def __len__(self) -> int:
        """Models that somebody holds."""
        return len(self._models)

    def __iter__(self) -> Iterator[LoadedModel]:
        """Models that somebody holds."""
        return iter(list(self._models.values()))


_cache = ModelCache()


def load_pipeline(
    host: Host, pipeline: Any, files: Sequence[Path], *, model: str, device: str, dtype: str,
    **options: Any,
) -> NodeResult:  # fmt: skip
    """Load a model, or return it from the cache.

    Args:
        host: says what device "auto" is.
        pipeline: class whose `from_pretrained` loads the model.
        files: what the model is loaded from.
        model, device, dtype: of the widgets.
        **options: further arguments of `from_pretrained`.

    Raises:
        OptionError: no such device, or see `from_pretrained`.
        UnsupportedModelError: see `from_pretrained`.
    """
    device, kind = choose_placement(host.device() if device == AUTO else device, dtype)
    key = (pipeline, model, device, kind, *sorted(options.items()), describe_files(files))

    def load() -> LoadedModel:
        pipe = pipeline.from_pretrained(model, device=device, dtype=kind, **options)
        return LoadedModel(model, name_dtype(kind), pipe)

    return NodeResult((_cache.find(key, host, device, files, load),))


def describe_files(files: Sequence[Path]) -> str:
    """Names, sizes and times of files: the text changes when a file is replaced."""
    facts = [(f.as_posix(), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return repr(sorted(facts))


def load_model(
    host: Host, *, model: str, width: int | None, height: int | None, decoder: str, **options: Any
) -> NodeResult:
    """Load an image model, or return it from the cache.

    Raises:
        OptionError: no such model, device or size; a file is missing.
        UnsupportedModelError: files of no known model.
    """
    files = content_files(find_source(model), Path(decoder) if decoder else None)
    size = None if width is None or height is None else (width, height)
    return load_pipeline(
        host, TextToImage, files, model=model, size=size, decoder=decoder or None, **options
    )


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


def check_model(
    *,
    model: str,
    device: str,
    dtype: str,
    width: int | None,
    height: int | None,
    decoder: str,
    cuda_graphs: UseGraphs,
    **others: Any,
) -> None:
    """Check what can be checked before anything is loaded.

    Raises:
        OptionError: no such file or device, or a size of one side only.
        MissingBackendError: CUDA graphs on a CPU.
    """
    if not is_hub_id(model):
        find_source(model)
    if decoder:
        LoadConfig(decoder=Path(decoder))
    check_engine(device, dtype, cuda_graphs)
    if (width is None) != (height is None):
        raise OptionError(
            f"width, height: expected both or neither, received {width or 0} and {height or 0}; "
            "0 and 0 take the model's own size"
        )


def describe_model_files(*, model: str, decoder: str, **others: Any) -> str:
    """A text that changes when the files of a model change; empty where they are on the hub."""
    if is_hub_id(model) and not Path(model).exists():
        return ""
    return describe_files(content_files(find_source(model), Path(decoder) if decoder else None))


def _size(name: str) -> Widget:
    note = f"Pixels, for models that draw several sizes. 0 takes the model's own {name}."
    return Widget(name, "int", 0, note, 0, _SIDE, 1, stands_for=((0, None),))


LOAD = NodeSpec(
    id=f"{PREFIX}LoadModel",
    title="MMAccel Load Model",
    summary="Loads a model that generates images token by token, and keeps it while it is in use.",
    inputs=(
        Widget(
            "model", "path", next(iter(MODELS)),
            f"A model that ships with mmaccel ({', '.join(MODELS)}), a folder or file, or an id "
            "of the Hugging Face hub such as owner/name, which is downloaded.",
        ),
        *device_widgets("generator"),
        _size("width"),
        _size("height"),
        Widget(
            "decoder", "path", "", "A file with the image decoder, for checkpoints without.",
            is_advanced=True,
        ),
        Widget(
            "family", "choice", AUTO, "How the checkpoint is read; auto finds out.",
            choices=(AUTO, *IMAGE_MODELS), stands_for=((AUTO, None),), is_advanced=True,
        ),
        CUDA_GRAPHS,
        FUSED,
    ),
    outputs=(Output("model", MODEL, "The loaded model."),),
    run=load_model,
    check=check_model,
    fingerprint=describe_model_files,
)  # fmt: skip
