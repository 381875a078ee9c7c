"""KVzap's trained scorers: networks that make a score for each key head of hidden states.

A file of safetensors as kvpress writes it (`nvidia/KVzap-linear-Qwen3-8B`,
`nvidia/KVzap-mlp-Qwen3-8B` and others on the hub): `layers.7.weight` and `layers.7.bias` of a
linear map, or `layers.7.0.…` and `layers.7.2.…` of two with GELU between.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.checks import check_path
from mmaccel.config_files import shorten
from mmaccel.errors import UnsupportedModelError
from mmaccel.reduction.kv_cache.contract import LayerSizes
from mmaccel.weight_folders import open_weights

WEIGHTS = "model.safetensors"
_OPTION = "KVzap.scorer"
_FORMS = (("",), ("0.", "2."))  # names of the maps of a layer: of one, of two
_PUBLISHED = "a published scorer, such as nvidia/KVzap-mlp-Qwen3-8B"


class Scorer:
    """The networks of all layers, each a map of weight `[N, C]` and bias `[N]`, or two."""

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


def open_scorer(path: str) -> Scorer:
    """Read a scorer; one that did not change is read once."""
    file = Path(path) / WEIGHTS if os.path.isdir(path) else Path(path)
    hint = f"download a scorer, such as nvidia/KVzap-mlp-Qwen3-8B, and give its folder or {WEIGHTS}"
    check_path(_OPTION, file, "file", hint=hint)
    file = file.resolve()
    state = os.stat(file)
    return _read(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=2)
def _read(file: Path, _time: int, _size: int) -> Scorer:
    weights = open_weights(file, _OPTION, asked="the first layer", remedy=f"give {_PUBLISHED}")
    known = weights.shapes
    form = next((form for form in _FORMS if f"layers.0.{form[0]}weight" in known), ())
    shapes = [known.get(f"layers.0.{name}weight", ()) for name in form]
    if not form or any(len(shape) != 2 for shape in shapes):
        raise UnsupportedModelError(
            f"{_OPTION}: expected weight and bias of one linear map a layer (layers.0.weight) or "
            f"of two (layers.0.0.weight, layers.0.2.weight) in {file}, received {len(known)} "
            f"tensors such as {shorten(sorted(known)[:3])}; give {_PUBLISHED}"
        )
    depth = len(known) // (2 * len(form))
    expected: dict[str, tuple[int, ...]] = {}
    for layer in range(depth):
        width = shapes[0][1]
        for name, (out, _) in zip(form, shapes, strict=True):
            expected[f"layers.{layer}.{name}weight"] = (out, width)
            expected[f"layers.{layer}.{name}bias"] = (out,)
            width = out  # what one map makes is what the next reads
    tensors = weights.read(expected)
    maps = []
    for layer in range(depth):
        names = [f"layers.{layer}.{name}" for name in form]
        maps.append([(tensors[f"{name}weight"], tensors[f"{name}bias"]) for name in names])
    return Scorer(maps)
