"""Calls of tiny vision-language models under a policy, with all visual tokens or fewer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.catalog import REDUCERS, make
from mmaccel.pipelines.hosts.vision_language.towers import find_tower
from tests.fixtures.tiny_vlms import build_vlm, encodes_first

N_NEW = 8
GREEDY: dict[str, Any] = dict(max_new_tokens=N_NEW, do_sample=False)
reduces = pytest.mark.skipif(
    not encodes_first(), reason="this transformers encodes images in its first pass"
)
Method = Callable[..., Any]


def _named(name: str) -> Method:
    return lambda **budget: make("visual_tokens", name, **budget)


METHODS: dict[str, Method] = {name: _named(name) for name in REDUCERS} | {
    "tome, all features": lambda **budget: mmaccel.ToMe(features="all", **budget),
    "tome to a cosine": lambda **budget: mmaccel.ToMe(threshold=0.6, **budget),
    "pyramid-drop, one layer": lambda **budget: mmaccel.PyramidDrop(layers=(2,), **budget),
    "ilre, layer 2": lambda **budget: mmaccel.ILRe(layer=2, **budget),
}
"""Every reducer of the catalog, and what its fields change; each makes one of a budget."""


def position_ids(name: str, model: Any, inputs: dict[str, Any]) -> Tensor:
    """Those of the whole prompt."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if name.startswith("qwen"):
        names = ("image_grid_thw", "video_grid_thw", "mm_token_type_ids")
        grids = {key: inputs[key] for key in names if key in inputs}
        positions: Tensor = model.base_model.get_rope_index(ids, attention_mask=mask, **grids)[0]
        return positions
    counted: Tensor = (mask.cumsum(1) - 1).clamp(min=0)
    return counted


def answer(
    model: Any, method: Any, inputs: Any, policy: Any = None, seed: Any = 5, **options: Any
) -> tuple[Tensor, Any]:
    """Tokens and statistics of a call that a policy serves, the plain loop unless one is given."""
    policy = policy or mmaccel.Autoregressive()
    with mmaccel.attach(model, policy, strict=True, seed=seed, visual_tokens=method) as run:
        made = model.generate(**inputs, **GREEDY | options)
    return made, run.stats


def build_looking(name: str, depth: int | None = None) -> Any:
    """A model whose tower looks at something, at lengths that a sliding window does not reach."""
    model = build_vlm(name, window=512 if name == "gemma3" else None, depth=depth)
    with torch.no_grad():
        for weight in find_tower(model).parameters():
            if weight.ndim == 2:
                weight.mul_(0.16 / weight.std())
    return model


@cache
def shared_looking(name: str, depth: int | None = None) -> Any:
    """The model of `build_looking` for all tests that leave it as it was."""
    return build_looking(name, depth)


@contextmanager
def seen_by_tower(model: Any) -> Iterator[list[Tensor]]:
    """Inside the block, the states that the layers of a model's tower compute."""
    seen: list[Tensor] = []
    hooks = [
        module.mlp.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
        for module in find_tower(model).modules()
        if hasattr(module, "mlp") and not hasattr(module, "probe")
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
