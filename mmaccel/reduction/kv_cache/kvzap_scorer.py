"""KVzap's trained scorers: networks that make a score for each key head of hidden states.

A scorer is a file of safetensors as kvpress writes it (`nvidia/KVzap-linear-Qwen3-8B`,
`nvidia/KVzap-mlp-Qwen3-8B` and others on the hub): `layers.7.weight` and `layers.7.bias` of a
linear map, or `layers.7.0.…` and `layers.7.2.…` of two with GELU between. The sizes are those of
its tensors.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.checks import check_path
from mmaccel.config_files import check_regular, shorten
from mmaccel.errors import UnsupportedModelError
from mmaccel.reduction.kv_cache.contract import LayerSizes

WEIGHTS = "model.safetensors"
_OPTION = "KVzap.scorer"
_FORMS = (("",), ("0.", "2."))  # names of the maps of a layer: of one, of two
_REMEDY = "give a published scorer, such as nvidia/KVzap-mlp-Qwen3-8B"


class Scorer:
    """The networks of all layers.

    Args:
        maps: weight `[N, C]` and bias `[N]` of one map, or of two, for each layer.

    Attributes:
        sizes: of the layers that it is for.
    """

    def __init__(self, maps: list[list[tuple[Tensor, Tensor]]]) -> None:
        self._maps = maps
        self._placed: dict[tuple[int, torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        first = maps[0]
        self.sizes = LayerSizes(len(maps), first[-1][0].shape[0], first[0][0].shape[1])

    def score(self, index: int, hidden: Tensor) -> Tensor:
        """Scores `[R, H, W]` float32 of entries with these hidden states `[R, W, C]` in a layer."""
        key = (index, hidden.device, hidden.dtype)
        if key not in self._placed:
            self._placed[key] = [(w.to(hidden), b.to(hidden)) for w, b in self._maps[index]]
        for number, (weight, bias) in enumerate(self._placed[key]):
            if number:
                hidden = F.gelu(hidden)
            hidden = F.linear(hidden, weight, bias)
        return hidden.mT.float()


def find_weights(path: str) -> Path:
    """The file of a scorer.

    Args:
        path: of the file, or of a folder with `model.safetensors`.

    Raises:
        OptionError: no such file or folder.
        UnsupportedModelError: a folder without the file, or no regular file.
    """
    if os.path.isdir(path):
        check_regular(Path(path) / WEIGHTS, _OPTION)
        return Path(path) / WEIGHTS
    hint = f"download a scorer, such as nvidia/KVzap-mlp-Qwen3-8B, and give its folder or {WEIGHTS}"
    check_path(_OPTION, path, "file", hint=hint)
    return Path(path)


def open_scorer(path: str) -> Scorer:
    """Read a scorer; one that did not change is read once.

    Raises:
        OptionError, UnsupportedModelError: see `find_weights`.
        UnsupportedModelError: what safetensors cannot read, or other tensors.
    """
    file = find_weights(path).resolve()
    state = os.stat(file)
    return _read(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=2)
def _read(file: Path, _time: int, _size: int) -> Scorer:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise UnsupportedModelError(
            f"{_OPTION}: expected tensors in {file}, received what safetensors cannot read "
            f"({error}); download it again"
        ) from error
    form = next((form for form in _FORMS if f"layers.0.{form[0]}weight" in tensors), None)
    depth = len(tensors) // (2 * len(form)) if form else 0
    if form is None or set(tensors) != {
        f"layers.{layer}.{name}{kind}"
        for layer in range(depth)
        for name in form
        for kind in ("weight", "bias")
    }:
        raise UnsupportedModelError(
            f"{_OPTION}: expected weight and bias of one linear map a layer (layers.0.weight) or "
            f"of two (layers.0.0.weight, layers.0.2.weight) in {file}, received {len(tensors)} "
            f"tensors such as {shorten(sorted(tensors)[:3])}; {_REMEDY}"
        )
    maps = []
    for layer in range(depth):
        names = [f"layers.{layer}.{name}" for name in form]
        maps.append([(tensors[f"{name}weight"], tensors[f"{name}bias"]) for name in names])
    _check_shapes(maps, file)
    return Scorer(maps)


def _check_shapes(maps: list[list[tuple[Tensor, Tensor]]], file: Path) -> None:
    """Raise UnsupportedModelError unless the maps of every layer fit each other, all alike."""
    shapes = Counter(tuple(tuple(one.shape) for pair in layer for one in pair) for layer in maps)
    fits = len(shapes) == 1
    for weight, bias in maps[0] if fits else []:
        fits = fits and weight.ndim == 2 and bias.shape == weight.shape[:1]
    if fits and len(maps[0]) == 2:
        fits = maps[0][0][0].shape[0] == maps[0][1][0].shape[1]
    is_finite = all(one.isfinite().all() for layer in maps for pair in layer for one in pair)
    if not fits or not is_finite:
        received = f"shapes {list(shapes)[:2]}" if is_finite else "numbers that are not finite"
        raise UnsupportedModelError(
            f"{_OPTION}: expected maps of the same shapes in all layers of {file}, whose outputs "
            f"are the inputs of the next, and finite numbers, received {received}; {_REMEDY}"
        )


def describe(sizes: LayerSizes) -> str:
    """Sizes of layers in words."""
    return f"{sizes.depth} layers of {sizes.heads} key heads over {sizes.channels} channels"
