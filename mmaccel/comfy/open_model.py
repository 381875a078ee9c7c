"""The node that loads a model, and what it hands on."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import torch

from mmaccel.catalog import MODELS
from mmaccel.comfy.table import MODEL, PREFIX, Host, Made, NodeSpec, Output, Widget
from mmaccel.errors import OptionError
from mmaccel.pipelines.checkpoint import Place
from mmaccel.pipelines.engine import Engine
from mmaccel.pipelines.model_folder import check_place, content_files
from mmaccel.pipelines.picture_families import PICTURES
from mmaccel.pipelines.picture_maker import Maker
from mmaccel.pipelines.picture_models import find_source, is_hub_id
from mmaccel.pipelines.text_to_image import TextToImage
from mmaccel.results import EXACT_DTYPE

_AUTO = "auto"
_DTYPES = (EXACT_DTYPE, "bfloat16", "float16")
_SIDE = 16384  # pixels; no model draws more
_WIDER = 2  # room is made for files of 16 bits read as 32, or for their passes


@dataclass(frozen=True, eq=False)
class OpenModel:
    """A loaded model.

    Attributes:
        name: as it was asked for.
        dtype: of the generator.
        maker: makes pictures.
    """

    name: str
    dtype: str
    maker: Maker

    @property
    def pipe(self) -> TextToImage:
        """The model itself."""
        return self.maker.pipe


# Held weakly: whoever wants a model twice gets it once, and ComfyUI alone decides how long it
# stays (its cache of outputs holds it, and freeing that cache frees the memory).
_open: WeakValueDictionary[tuple[Any, ...], OpenModel] = WeakValueDictionary()
_guard = Lock()


def load_model(
    host: Host,
    *,
    model: str,
    device: str,
    dtype: str,
    width: int | None,
    height: int | None,
    decoder: str,
    family: str | None,
    engine: str,
) -> Made:
    """Load a model, or hand out the one that is loaded already.

    Raises:
        OptionError: no such model, device or size; a file is missing.
        UnsupportedModelError: nothing we know.
    """
    place = host.device() if device == _AUTO else device
    files = content_files(find_source(model), Path(decoder) if decoder else None)
    key = (model, place, dtype, width, height, decoder, family, engine, _state(files))
    with _guard:
        found = _open.get(key)
        if found is None:
            host.check_interrupt()  # a download may have taken long
            gc.collect()  # a model that nobody holds any more may wait in a cycle for its end
            host.make_room(_WIDER * sum(file.stat().st_size for file in files), place)
            pipe = TextToImage.from_pretrained(
                model,
                device=place,
                dtype=getattr(torch, dtype),
                size=None if width is None or height is None else (width, height),
                decoder=decoder or None,
                family=family,
                engine=engine,
            )
            found = _open[key] = OpenModel(model, dtype, Maker(pipe))
    return Made((found,))


def check_model(
    *,
    model: str,
    device: str,
    dtype: str,
    width: int | None,
    height: int | None,
    decoder: str,
    engine: str,
    **others: Any,
) -> None:
    """Refuse what can be seen to be wrong before anything is loaded.

    Raises:
        OptionError: no such file or device, or a size of one side only.
        MissingBackendError: an engine that the device does not have.
    """
    if not is_hub_id(model):
        find_source(model)
    if decoder:
        Place(decoder=Path(decoder))
    if device != _AUTO and dtype in _DTYPES:
        check_place(device, getattr(torch, dtype))
        Engine(engine).check(device)
    if (width is None) != (height is None):
        raise OptionError(
            f"width, height: expected both or neither, received {width or 0} and {height or 0}; "
            "0 and 0 take the model's own size"
        )


def file_state(*, model: str, decoder: str, **others: Any) -> str:
    """What the files of a model look like from outside: another text once they are replaced."""
    if is_hub_id(model) and not Path(model).exists():
        return ""
    return _state(content_files(find_source(model), Path(decoder) if decoder else None))


def _state(files: Sequence[Path]) -> str:
    facts = [(f.as_posix(), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return repr(sorted(facts))


def _size(name: str) -> Widget:
    note = f"Pixels, for models that draw several sizes. 0 takes the model's own {name}."
    return Widget(name, "int", 0, note, 0, _SIDE, 1, stands_for=((0, None),))


LOAD = NodeSpec(
    id=f"{PREFIX}LoadModel",
    title="MMAccel Load Model",
    summary="Loads a model that makes pictures token by token, and keeps it while it is in use.",
    inputs=(
        Widget(
            "model", "path", next(iter(MODELS)),
            f"A model that ships with mmaccel ({', '.join(MODELS)}), a folder or file, or an id "
            "of the Hugging Face hub such as owner/name, which is downloaded.",
        ),
        Widget(
            "device", "choice", _AUTO, "Where it runs; auto is where ComfyUI computes.",
            choices=(_AUTO, "cpu", "cuda"),
        ),
        Widget(
            "dtype", "choice", EXACT_DTYPE,
            f"Of the generator. {EXACT_DTYPE} keeps every promise to the bit, the others up to "
            "rounding.",
            choices=_DTYPES,
        ),
        _size("width"),
        _size("height"),
        Widget("decoder", "path", "", "A file with the picture decoder, for checkpoints without."),
        Widget(
            "family", "choice", _AUTO, "How the checkpoint is read; auto finds out.",
            choices=(_AUTO, *PICTURES), stands_for=((_AUTO, None),),
        ),
        Widget(
            "engine", "choice", "auto",
            "How passes are carried out: eager, graph (a captured step, CUDA only), or auto.",
            choices=("auto", "eager", "graph"),
        ),
    ),
    outputs=(Output("model", MODEL, "The loaded model."),),
    run=load_model,
    check=check_model,
    fingerprint=file_state,
)  # fmt: skip
