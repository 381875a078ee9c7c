"""Features of pictures: which extractor, and running it over a folder.

`scenes` is the small network that ships (pictures of 64x64 captioned scenes alone); `inception` is
the network of FID (`mmaccel.evaluation.inception`), for which a file with its weights is given;
`module:function` is the user's own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmaccel.catalog import load
from mmaccel.errors import OptionError, ShapeError
from mmaccel.evaluation.frechet import Array, check_features
from mmaccel.evaluation.inception import open_inception

Extract = Callable[[Tensor], Tensor]
"""Pictures `[B, 3, H, W]` uint8 to features `[B, D]`."""


def open_extractor(name: str, weights: Path | None = None) -> Extract:
    """An extractor by name.

    Args:
        name: "scenes", "inception" or "module:function".
        weights: a file; for inception alone.

    Raises:
        OptionError: another name, or weights too many or too few.
        MissingBackendError: inception without torch-fidelity.
    """
    if (weights is not None) != (name == "inception"):
        wanted = "a file for inception" if weights is None else f"none for {name}"
        raise OptionError(
            f"weights: expected {wanted}, received {None if weights is None else str(weights)!r}; "
            "the weights of FID are weights-inception-2015-12-05-6726825d.pth of torch-fidelity"
        )
    if name == "scenes":
        extract: Extract = load("mmaccel.demo.scenes.features:extract_features")
        return extract
    if name == "inception":
        assert weights is not None
        return open_inception(weights)
    return load_callable(name, "features", "scenes, inception or module:function")


def load_callable(name: str, option: str, wanted: str = "module:function") -> Callable[..., Any]:
    """Import a callable of the user's; the folder in which the program runs counts as installed.

    Raises:
        OptionError: no such module or name, or no callable.
    """
    module, _, attribute = name.partition(":")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        is_name = module and attribute and not module.startswith(".")
        found = getattr(import_module(module), attribute) if is_name else None
    except (ImportError, AttributeError, SyntaxError) as error:
        reason = " ".join(str(error).split())[:100]
        raise OptionError(
            f"{option}: expected {wanted}, received {name!r} ({reason}); check the spelling"
        ) from error
    finally:
        if here in sys.path:  # the module may have changed it
            sys.path.remove(here)
    if not callable(found):
        raise OptionError(f"{option}: expected {wanted}, received {name!r}; name a callable")
    called: Callable[..., Any] = found
    return called


def extract_all(batches: Iterable[Tensor], extract: Extract) -> Array:
    """Features `[N, D]` float64 of all pictures.

    Args:
        batches: pictures `[B, 3, H, W]` uint8.
        extract: see `Extract`.

    Raises:
        ShapeError: what the extractor returns is not `[B, D]`, or D changes.
        NumericsError: features that are not finite.
    """
    parts = []
    for batch in batches:
        with torch.no_grad():
            found = _to_array(extract(batch))
        if found.ndim != 2 or len(found) != len(batch):
            raise ShapeError(
                f"features: expected [{len(batch)}, D] for a batch of {len(batch)}, received "
                f"{list(found.shape)}; return one row for each picture"
            )
        parts.append(check_features(found, least=1))
        if parts[-1].shape[1] != parts[0].shape[1]:
            raise ShapeError(
                f"features: expected a width of {parts[0].shape[1]} for every batch, received "
                f"{parts[-1].shape[1]}; pool over what depends on the size of a picture"
            )
    return np.concatenate(parts)


def _to_array(made: Any) -> Array:
    """What an extractor returned as float64 on the processor.

    Raises:
        ShapeError: no tensor, and nothing of which one can be made.
    """
    try:
        given = torch.as_tensor(made).detach().cpu()
        found: Array = np.asarray(given if given.is_complex() else given.double())  # told later
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShapeError(
            f"features: expected a tensor [B, D], received {type(made).__name__}; return one row "
            "for each picture"
        ) from error
    return found
