"""Calls of tiny vision-language models under a policy, with all visual tokens or fewer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

import mmaccel
from mmaccel.catalog import REDUCERS, make
from tests.fixtures.tiny_vlms import encodes_first

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
