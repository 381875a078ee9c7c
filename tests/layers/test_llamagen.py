"""LlamaGen's layers under methods: identity, a mask over the full cache, one plan a pair, trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.pipelines.layers import attention as attention_module
from mmaccel.pipelines.layers import sparse as sparse_module
from mmaccel.pipelines.layers.methods import LayerMethods, reducing
from mmaccel.pipelines.layers.store import WindowLayer
from mmaccel.reduction.kv_cache.contract import CachedLayer, CacheMethod
from tests.fixtures.llamagen import Transformer, conditions, open_llamagen
from tests.layers.planted import EVICTION
from tests.layers.test_denoisers import choose_by_hand
from tests.models.test_llamagen import KINDS, sample

POLICIES = (mmaccel.Autoregressive(), mmaccel.Jacobi(5))


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


def check_eviction(scale: float, policy: Any) -> None:
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


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_eviction_is_a_mask_over_the_full_cache(policy: Any, scale: float) -> None:
    check_eviction(scale, policy)


@pytest.mark.parametrize("bug", ["one index too many", "branches plan alone", "heads are mixed up"])
def test_planted_bugs_of_eviction_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    EVICTION[bug](monkeypatch)
    with pytest.raises(AssertionError):
        check_eviction(3.0, mmaccel.Jacobi(5))


QUEST = mmaccel.Quest(budget=0.4, block=3, first_layer=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_blocks_are_chosen_in_layers_of_images(kind: str, scale: float) -> None:
    """The plain loop under blocks that brute force chooses, in full passes as published."""
    check_blocks(kind, scale)


def check_blocks(kind: str, scale: float) -> None:
    window, tokens, _ = decode(kind, mmaccel.Autoregressive(), LayerMethods(attention=QUEST), scale)
    _, whole, _ = decode(kind, mmaccel.Autoregressive(), LayerMethods(), scale)
    assert not torch.equal(tokens, whole)
    branches = 1 if scale == 1 else 2
    model, first, seen = conditions(kind, scale != 1)
    width, n_heads = first.shape[1], model.sizes.n_head
    rows, size = len(first), width + 15
    hidden = torch.zeros(2, rows, n_heads, size, size, dtype=torch.bool)
    # slot by slot: what a query reads changes the keys of later layers
    for query in range(width, size):
        keys, queries = states_of(model, first, tokens.repeat(branches, 1), seen, hidden)
        for row in range(rows):
            real = int(width - seen[row].sum())  # padding on the left is in no cache
            own = query - real
            for head in range(n_heads):
                at = keys[row, head, real : query + 1]
                kept = choose_by_hand(
                    at,
                    queries[row, head, query : query + 1],
                    torch.tensor([own]),
                    torch.ones(len(at)).bool(),
                )
                for place in range(own + 1):
                    hidden[1, row, head, query, real + place] = place // QUEST.block not in kept
    logits = model(first, tokens.repeat(branches, 1), seen, hidden)
    if branches == 2:
        given, nothing = logits.chunk(2)
        logits = nothing + scale * (given - nothing)
    assert torch.equal(logits.argmax(-1), tokens)


def states_of(
    model: Transformer, first: Tensor, tokens: Tensor, seen: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotated keys and queries `[R, H, N, D]` of the second layer in full passes."""
    found: list[Tensor] = []
    model(first, tokens, seen, hidden, lambda layer, *given: found.extend(layer.states(*given)))
    return found[4], found[3]


def test_planted_bugs_of_blocks_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = sparse_module.SparseBlocks.choose
    monkeypatch.setattr(
        sparse_module.SparseBlocks,
        "choose",
        lambda self, layer, query, key, start, **given: own(
            self, layer, -query, key, start, **given
        ),
    )
    with pytest.raises(AssertionError):
        check_blocks("text", 1.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("evicts", [False, True])
def test_trees_have_the_tokens_of_the_plain_loop(kind: str, evicts: bool) -> None:
    methods = LayerMethods(LargestValues(3)) if evicts else LayerMethods()
    tree = mmaccel.Jacobi(window=6, drafts="token-recycling", tree=mmaccel.Comb(2, 3))
    plain, branching = (
        decode(kind, policy, methods, 3.0)[1] for policy in (mmaccel.Autoregressive(), tree)
    )
    assert torch.equal(branching, plain)


def test_a_tree_whose_branches_see_each_other_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "_hide_branches", lambda mask, *_: mask)
    with pytest.raises(AssertionError):
        test_trees_have_the_tokens_of_the_plain_loop("text", False)


def test_a_run_after_one_under_methods_is_whole_again() -> None:
    window, prompt = open_llamagen("text", True)
    made = []
    for methods in (LayerMethods(), LayerMethods(LargestValues(3)), LayerMethods()):
        with reducing(window, methods, prompt.branches):
            made.append(sample(window, prompt, mmaccel.Jacobi(5), temperature=0.0).tokens)
    assert torch.equal(made[0], made[2]) and not torch.equal(made[0], made[1])


EVERY = 4


def check_rounds(scale: float, policy: Any) -> None:
    """Greedy tokens are those of full passes as published, under a mask that moves on.

    `StreamingLLM` keeps by position alone: what a query sees follows from its own.
    """
    method = mmaccel.StreamingLLM(budget=4, sinks=2, every=EVERY)
    _, whole, _ = decode("text", policy, LayerMethods(), scale)
    window, tokens, _ = decode("text", policy, LayerMethods(method), scale)
    assert not torch.equal(tokens, whole)
    branches = 1 if scale == 1 else 2
    model, first, seen = conditions("text", scale != 1)
    width = first.shape[1]
    size = width + 15
    hidden = torch.zeros(2, len(first), model.sizes.n_head, size, size, dtype=torch.bool)
    for row in range(len(first)):
        pad = int(width - seen[row].sum())
        n_prompt = width - pad
        for query in range(n_prompt, size - pad):
            # the last boundary that stands a round before the query; the prompt's end at least
            boundary = n_prompt + max((query - n_prompt) // EVERY - 1, 0) * EVERY
            for entry in range(method.sinks, boundary - (method.budget - method.sinks)):
                hidden[:, row, :, pad + query, pad + entry] = True
    logits = model(first, tokens.repeat(branches, 1), seen, hidden)
    if branches == 2:
        given, nothing = logits.chunk(2)
        logits = nothing + scale * (given - nothing)
    assert torch.equal(logits.argmax(-1), tokens)


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("policy", [mmaccel.Autoregressive(), mmaccel.Jacobi(4)], ids=repr)
def test_rounds_are_a_mask_that_moves_on(policy: Any, scale: float) -> None:
    check_rounds(scale, policy)


def test_a_window_that_sees_what_goes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WindowLayer, "hide", lambda *given: None)
    with pytest.raises(AssertionError):
        check_rounds(1.0, mmaccel.Jacobi(4))
