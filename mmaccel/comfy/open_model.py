"""The node that loads a model, and what it hands on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmaccel.catalog import MODELS
from mmaccel.comfy.kept_models import KeptModels, state_of
from mmaccel.comfy.table import MODEL, PREFIX, Host, Made, NodeSpec, Output, Widget
from mmaccel.errors import OptionError
from mmaccel.loading import DTYPES
from mmaccel.pipelines.loading.checkpoint import LoadConfig
from mmaccel.pipelines.loading.sources import check_device, content_files, is_hub_id
from mmaccel.pipelines.runner.engine import Engine, UseGraphs
from mmaccel.pipelines.text_to_image.pipeline import ImageGenerator, TextToImage
from mmaccel.pipelines.text_to_image.registry import IMAGE_MODELS, find_source
from mmaccel.results import EXACT_DTYPE

AUTO = "auto"
_SIDE = 16384  # pixels; no model draws more


@dataclass(frozen=True, eq=False)
class OpenModel:
    """A loaded model.

    Attributes:
        name: as it was asked for.
        dtype: of the generator.
        generator: makes images.
    """

    name: str
    dtype: str
    generator: ImageGenerator

    @property
    def pipe(self) -> TextToImage:
        """The model itself."""
        return self.generator.pipe


_kept: KeptModels[OpenModel] = KeptModels()


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
    cuda_graphs: UseGraphs,
) -> Made:
    """Load a model, or hand out the one that is loaded already.

    Raises:
        OptionError: no such model, device or size; a file is missing.
        UnsupportedModelError: nothing we know.
    """
    place = host.device() if device == AUTO else device
    files = content_files(find_source(model), Path(decoder) if decoder else None)
    key = (model, place, dtype, width, height, decoder, family, cuda_graphs, state_of(files))

    def load() -> OpenModel:
        pipe = TextToImage.from_pretrained(
            model,
            device=place,
            dtype=getattr(torch, dtype),
            size=None if width is None or height is None else (width, height),
            decoder=decoder or None,
            family=family,
            cuda_graphs=cuda_graphs,
        )
        return OpenModel(model, dtype, ImageGenerator(pipe))

    return Made((_kept.find(key, host, place, files, load),))


def place_widgets(what: str) -> tuple[Widget, Widget]:
    """Device and dtype of a part of a model."""
    note = (
        f"Of the {what}. {EXACT_DTYPE} keeps every promise to the bit, the others up to rounding."
    )
    return (
        Widget(
            "device", "choice", AUTO, "Where it runs; auto is where ComfyUI computes.",
            choices=(AUTO, "cpu", "cuda"),
        ),
        Widget("dtype", "choice", EXACT_DTYPE, note, choices=DTYPES),
    )  # fmt: skip


def check_where(device: str, dtype: str, cuda_graphs: UseGraphs) -> None:
    """Refuse a place that is known, and does not do.

    Raises:
        OptionError: no such device.
        MissingBackendError: CUDA graphs on another device.
    """
    if device != AUTO and dtype in DTYPES:
        check_device(device, getattr(torch, dtype))
        Engine(cuda_graphs).check(device)


CUDA_GRAPHS = Widget(
    "cuda_graphs", "choice", AUTO,
    "Whether forward passes are captured in CUDA graphs; auto does where that works.",
    choices=(AUTO, "on", "off"), stands_for=(("on", True), ("off", False)),
)  # fmt: skip


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
    """Refuse what can be seen to be wrong before anything is loaded.

    Raises:
        OptionError: no such file or device, or a size of one side only.
        MissingBackendError: CUDA graphs on another device.
    """
    if not is_hub_id(model):
        find_source(model)
    if decoder:
        LoadConfig(decoder=Path(decoder))
    check_where(device, dtype, cuda_graphs)
    if (width is None) != (height is None):
        raise OptionError(
            f"width, height: expected both or neither, received {width or 0} and {height or 0}; "
            "0 and 0 take the model's own size"
        )


def file_state(*, model: str, decoder: str, **others: Any) -> str:
    """What the files of a model look like from outside: another text once they are replaced."""
    if is_hub_id(model) and not Path(model).exists():
        return ""
    return state_of(content_files(find_source(model), Path(decoder) if decoder else None))


def _size(name: str) -> Widget:
    note = f"Pixels, for models that draw several sizes. 0 takes the model's own {name}."
    return Widget(name, "int", 0, note, 0, _SIDE, 1, stands_for=((0, None),))


LOAD = NodeSpec(
    id=f"{PREFIX}LoadModel",
    title="MMAccel Load Model",
    summary="Loads a model that makes images token by token, and keeps it while it is in use.",
    inputs=(
        Widget(
            "model", "path", next(iter(MODELS)),
            f"A model that ships with mmaccel ({', '.join(MODELS)}), a folder or file, or an id "
            "of the Hugging Face hub such as owner/name, which is downloaded.",
        ),
        *place_widgets("generator"),
        _size("width"),
        _size("height"),
        Widget("decoder", "path", "", "A file with the image decoder, for checkpoints without."),
        Widget(
            "family", "choice", AUTO, "How the checkpoint is read; auto finds out.",
            choices=(AUTO, *IMAGE_MODELS), stands_for=((AUTO, None),),
        ),
        CUDA_GRAPHS,
    ),
    outputs=(Output("model", MODEL, "The loaded model."),),
    run=load_model,
    check=check_model,
    fingerprint=file_state,
)  # fmt: skip
