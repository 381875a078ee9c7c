"""LlamaGen under eviction: a mask over the full cache, one plan a pair. Its layers are Llama's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.pipelines.hosts.layers.methods import LayerMethods, reducing
from mmaccel.reduction.kv_cache.contract import CachedLayer, CacheMethod
from tests.fixtures.llamagen import conditions, open_llamagen
from tests.models.test_llamagen import sample


@dataclass(frozen=True)
class LargestValues(CacheMethod):
    """The entries with the largest values: what can be said of them where all keys are zero."""

    reads_keys: ClassVar[bool] = False

    def score(self, layer: CachedLayer) -> Tensor:
        """Of every head."""
        return layer.values.float().norm(dim=-1)


def decode(
    kind: str, policy: Any, methods: LayerMethods, scale: float
) -> tuple[Any, Tensor, tuple[int, int]]:
    """The window after a run, greedy tokens `[3, 16]`, and what was evicted."""
    window, prompt = open_llamagen(kind, scale != 1)
    with reducing(window, methods, prompt.branches):
        made = sample(window, prompt, policy, temperature=0.0, guidance_scale=scale)
    return window, made.tokens, window.layer_counts.n_evicted


def plan_by_hand(scale: float, budget: int) -> Tensor:
    """Which entries of the full rows are evicted, `[L, R, H, 1, N]` bool, as published."""
    model, first, seen = conditions("text", scale != 1)
    width, n_heads = first.shape[1], model.sizes.n_head
    taken: list[Tensor] = []  # values [R, H, T, D] of each layer
    blank = torch.zeros(len(first), 1, dtype=torch.int64)
    model(first, blank, seen, watch=lambda layer, *given: taken.append(layer.states(*given)[2]))
    evicted = torch.zeros(len(taken), len(first), n_heads, 1, width + 15, dtype=torch.bool)
    pairs = len(first) // 3
    for layer, values in enumerate(taken):
        norms = values.norm(dim=-1).unflatten(0, (pairs, 3)).mean(0)  # [3, H, T], of both branches
        for row in range(len(first)):
            real = [at for at in range(width) if bool(seen[row, at])]
            last = real[-1:]
            for head in range(n_heads):
                ranked = sorted(real, key=lambda at: -float(norms[row % 3, head, at]))  # noqa: B023
                kept = last + [at for at in ranked if at not in last]
                evicted[layer, row, head, 0, kept[budget:]] = True
    return evicted


@pytest.mark.parametrize(
    ("policy", "scale"), [(mmaccel.Autoregressive(), 1.0), (mmaccel.Jacobi(5), 3.0)], ids=repr
)
def test_eviction_is_a_mask_over_the_full_cache(policy: Any, scale: float) -> None:
    """Greedy tokens are those of full passes as published, under a mask of every layer and head."""
    budget = 3
    _, whole, _ = decode("text", policy, LayerMethods(), scale)
    window, tokens, evicted = decode("text", policy, LayerMethods(LargestValues(budget)), scale)
    branches = 1 if scale == 1 else 2
    assert evicted == (4 * branches, 11 * branches)  # rows of 4, 6 and 1 entries keep 3, 3 and 1
    assert not torch.equal(tokens, whole)  # otherwise nothing is proven
    model, first, seen = conditions("text", scale != 1)
    hidden = plan_by_hand(scale, budget).expand(-1, -1, -1, 21, -1).clone()
    hidden[..., :6, :] = False  # while the prompt is processed
    logits = model(first, tokens.repeat(branches, 1), seen, hidden)
    if branches == 2:
        given, nothing = logits.chunk(2)
        logits = nothing + scale * (given - nothing)
    assert torch.equal(logits.argmax(-1), tokens)
