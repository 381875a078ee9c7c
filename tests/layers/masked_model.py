"""What eviction and sparse attention are compared with: transformers' own model over its full cache
at the original positions, under a mask of every head of the layers that see everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mmaccel.pipelines.hosts.transformers_release import CACHE

NAME = "tests_masked"
Hides = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Layer, counted without those that slide, queries, keys and values to `[R, Hkv, W, S]` bool."""
_hides: list[tuple[Hides, bool, list[int]]] = []


def list_full(model: Any) -> list[int]:
    """The layers that see everything."""
    kinds = getattr(model.config, "layer_types", None)
    n_layers = model.config.num_hidden_layers
    return [i for i in range(n_layers) if kinds is None or kinds[i] == "full_attention"]


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any
) -> tuple[Tensor, None]:
    """Softmax attention in plain steps; key heads are repeated for their query heads."""
    groups = query.shape[1] // key.shape[1]
    width, length = query.shape[2], key.shape[2]
    hides, is_causal, full = _hides[-1]
    seen = torch.ones(width, length, dtype=torch.bool)
    later = seen.triu(length - width + 1) & is_causal
    if module.layer_idx in full:
        hidden = hides(full.index(module.layer_idx), query, key, value)
        hidden = hidden.repeat_interleave(groups, 1)
    else:
        hidden = seen.tril(length - width - module.sliding_window)
    scale = given.get("scaling") or query.shape[-1] ** -0.5
    scores = query @ key.repeat_interleave(groups, 1).mT * scale
    scores = scores.masked_fill(hidden | later, float("-inf"))
    out = scores.softmax(-1) @ value.repeat_interleave(groups, 1)
    return out.transpose(1, 2), None


@contextmanager
def masked(model: Any, hides: Hides, is_causal: bool = True) -> Iterator[None]:
    """Inside the block, the model's own layers hide keys, later ones too where they are causal;
    rows have no padding.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, lambda *args, **options: None)
    before = model.config._attn_implementation
    _hides.append((hides, is_causal, list_full(model)))
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        _hides.pop()


@torch.no_grad()
def greedy(model: Any, ids: Tensor, n_new: int, *, whole: bool = False) -> Tensor:
    """The model's own greedy tokens `[1, n_new]` after one row `[1, T]`.

    The last token of the prompt is processed with the first new one, as a window does, or with the
    whole prompt, as before an eviction or a choice.
    """
    from transformers import DynamicCache

    given: dict[str, Any] = {CACHE: DynamicCache(config=model.config), "use_cache": True}
    logits = model(ids if whole else ids[:, :-1], **given).logits
    token = logits[:, -1:].argmax(-1) if whole else ids[:, -1:]
    made = [token] if whole else []
    for _ in range(n_new - len(made)):
        token = model(token, **given).logits[:, -1:].argmax(-1)
        made.append(token)
    return torch.cat(made, 1)


def greedy_rows(
    model: Any,
    rows: list[list[int]],
    hides_of: Callable[[list[int]], Hides],
    n_new: int,
    *,
    whole: bool = True,
) -> list[list[int]]:
    """`greedy` of each row alone, under a mask of its own."""
    made = []
    for ids in rows:
        with masked(model, hides_of(ids)):
            made += greedy(model, torch.tensor([ids]), n_new, whole=whole).tolist()
    return made
