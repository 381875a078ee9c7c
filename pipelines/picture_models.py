"""Models that make pictures, by name.

A model is named by the name of one that ships, by a path, or by an id of the Hugging Face hub,
which `huggingface_hub` downloads to its cache and finds there the next time.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import mmaccel
from mmaccel.errors import OptionError
from mmaccel.pipelines.checkpoint import Place
from mmaccel.pipelines.model_folder import check_place
from mmaccel.pipelines.model_source import find_model
from mmaccel.pipelines.picture_families import PICTURES, find_picture_family
from mmaccel.pipelines.picture_model import PictureModel

_WITH_DECODER = ("chameleon", "lumina-mgpt", "llamagen")


def open_pictures(
    name: str | Path, place: Place, family: str | None = None
) -> tuple[PictureModel, Path]:
    """Load a model that makes pictures; also where it lies.

    Args:
        name: "scenes", a path, or an id of the hub.
        place: where it goes.
        family: one of `PICTURES`; None finds it out.

    Raises:
        OptionError: there is no such model, device, dtype, size or family, or a file is missing.
        UnsupportedModelError: nothing we know; with what was looked for.
    """
    if family is not None and family not in PICTURES:
        raise OptionError(
            f"family: expected one of {', '.join(PICTURES)}, received {family!r}; leave it out"
        )
    check_place(place.device, place.dtype)
    source = find_source(name)
    family = family or find_picture_family(source, name)
    if place.decoder is not None and family not in _WITH_DECODER:
        raise OptionError(
            f"decoder: expected none for {family}, whose checkpoints have their own, received "
            f"{str(place.decoder)!r}; leave it out"
        )
    module, _, function = PICTURES[family].partition(":")
    loaded: PictureModel = getattr(import_module(module), function)(source, place)
    return loaded, source


def find_source(name: str | Path) -> Path:
    """The folder or file of a model.

    Raises:
        OptionError: there is none; with the names that ship.
    """
    shelf = Path(mmaccel.__file__).parent / "demo" / "weights"
    shipped = sorted(file.parent for file in shelf.glob("*/config.json"))
    return find_model(name, {folder.name: folder for folder in shipped})
