"""The network of FID: Inception as torch-fidelity carries it, with weights that you give.

Its features are those of the original (pool3, 2048 wide), the original's way of resizing to 299x299
included, so that distances are comparable with torch-fidelity's and pytorch-fid's. torchmetrics
resizes with antialiasing by default and gives other numbers.

Departures: the network's module is imported without the rest of torch-fidelity, which wants a
torchvision that the network has no use for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mmaccel.errors import MissingBackendError, OptionError

_PACKAGE, _MODULE = "torch_fidelity", "torch_fidelity.feature_extractor_inceptionv3"


def open_inception(weights: Path) -> Callable[[Tensor], Tensor]:
    """Pictures `[B, 3, H, W]` uint8 to features `[B, 2048]` float32.

    Args:
        weights: a file of torch-fidelity's, a plain state dict.

    Raises:
        OptionError: no such file, or other tensors in it.
        MissingBackendError: torch-fidelity is not installed, or cannot be imported.
    """
    if not weights.is_file():
        raise OptionError(f"weights: expected a file, received {str(weights)!r}; check the path")
    network_class = load_network()
    try:
        torch.load(weights, map_location="cpu", weights_only=True)  # runs no code of the file
        network: Any = network_class("inception-v3-compat", ["2048"], str(weights)).eval()
    except (RuntimeError, UnpicklingError, EOFError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:160]
        raise OptionError(
            f"weights: expected the state dict of torch-fidelity's Inception, received "
            f"{str(weights)!r} ({type(error).__name__}: {reason}); take "
            "weights-inception-2015-12-05-6726825d.pth of its releases"
        ) from error

    def extract(pixels: Tensor) -> Tensor:
        features: Tensor = network(pixels)[0]
        return features

    return extract


def load_network() -> Any:
    """The class of the network.

    Raises:
        MissingBackendError: torch-fidelity is not installed, or its module cannot be imported.
    """
    found = find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise MissingBackendError(
            "inception: expected torch-fidelity, which is not installed; pip install --no-deps "
            "torch-fidelity, or give --features module:function"
        )
    package = ModuleType(_PACKAGE)  # an empty one, which finds its modules and imports none
    package.__path__ = list(found.submodule_search_locations)
    before = {name: module for name, module in sys.modules.items() if _is_its(name)}
    for name in before:
        del sys.modules[name]
    sys.modules[_PACKAGE] = package
    try:
        return import_module(_MODULE).FeatureExtractorInceptionV3
    except (ImportError, AttributeError) as error:
        raise MissingBackendError(
            f"inception: expected {_MODULE}, received {type(error).__name__} "
            f"({' '.join(str(error).split())[:120]}); install another version of torch-fidelity"
        ) from error
    finally:
        for name in [name for name in sys.modules if _is_its(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _is_its(name: str) -> bool:
    return name == _PACKAGE or name.startswith(f"{_PACKAGE}.")
