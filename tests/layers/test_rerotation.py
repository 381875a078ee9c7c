"""Kept keys at consecutive positions: transformers' own model on the shortened positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.pipelines.hosts.causal_lm import turning
from mmaccel.pipelines.hosts.layers.stores import LayerStores
from mmaccel.pipelines.hosts.transformers_release import CACHE
from tests.fixtures.fused_lms import build_decoder
from tests.fixtures.lanes import every
from tests.fixtures.tiny_lms import build_lm
from tests.layers.masked_model import list_full
from tests.layers.test_eviction import N_NEW, check_feed, draw_rows, generate
from tests.matrix.cells import covering

METHOD = mmaccel.StreamingLLM(budget=11, sinks=3, rerotate=True)
PLAIN = mmaccel.Autoregressive()


@torch.no_grad()
def expect(model: Any, ids: list[int], method: mmaccel.StreamingLLM, n_new: int) -> list[int]:
    """Greedy tokens of transformers' own model.

    Attention sees differences of positions alone. So the prompt is processed twice: from position
    0 on, which leaves the first keys, and so far before it that the last ones are behind those.
    """
    from transformers import DynamicCache

    prompt = torch.tensor([ids])
    n = prompt.shape[1]
    n_dropped = max(n - method.budget, 0)
    caches = []
    for first in (0, -n_dropped):
        cache = DynamicCache(config=model.config)
        at = torch.arange(first, first + n)[None]
        model(prompt, position_ids=at, **{CACHE: cache}, use_cache=True)
        caches.append(cache)
    joined = DynamicCache(config=model.config)
    for number, (whole, shifted) in enumerate(zip(*(cache.layers for cache in caches))):
        if number not in list_full(model):
            joined.update(shifted.keys, shifted.values, number)
            continue
        end = method.sinks + n_dropped
        keys = torch.cat([whole.keys[:, :, : method.sinks], shifted.keys[:, :, end:]], 2)
        values = torch.cat([whole.values[:, :, : method.sinks], whole.values[:, :, end:]], 2)
        joined.update(keys, values, number)
    token = model(prompt).logits[:, -1:].argmax(-1)
    made = [int(token)]
    for i in range(n_new - 1):
        at = torch.tensor([[n - n_dropped + i]])
        given: dict[str, Any] = {CACHE: joined, "use_cache": True}
        token = model(token, position_ids=at, **given).logits[:, -1:].argmax(-1)
        made.append(int(token))
    return made


def check(model: Any, policy: Any, method: Any, *, fused: Any = "auto") -> None:
    rows = draw_rows(33, 12, 21)
    received, stats = generate(model, policy, rows, kv_cache=method, fused=fused)
    for row, ids in enumerate(rows):
        assert received[row].tolist() == expect(model, ids, method, N_NEW)
    assert stats.exactness == "relaxed" and "33 of 66 cached entries" in stats.reference


@covering(
    name=["llama", "gemma3, deep"], fused=[True, False], policy=[PLAIN, mmaccel.Jacobi(window=5)]
)
def test_tokens_are_those_of_the_shortened_positions(name: str, fused: bool, policy: Any) -> None:
    check(build_lm(name), policy, METHOD, fused=fused)


def test_without_sinks() -> None:
    check(build_lm("llama"), mmaccel.Jacobi(window=5), replace(METHOD, sinks=0))


FAMILIES = (  # how keys turn: by halves, in part, grouped, neighbours, not in all layers
    "qwen2", "phi", "gpt_neox", "cohere with norms of heads", "glm", "smollm3", "gemma",
)  # fmt: skip


@pytest.mark.parametrize("name", every(3, FAMILIES))
def test_keys_turn_as_their_family_turns_them(name: str) -> None:
    check(build_decoder(name), mmaccel.Jacobi(window=4), METHOD, fused=False)


def test_angles_that_are_scaled_turn_alike() -> None:
    scaled = {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
        "rope_theta": 10000.0,
    }  # fmt: skip
    check(build_lm("llama", rope_parameters=scaled), PLAIN, METHOD)


def test_a_tree_goes_on_behind_the_kept_entries() -> None:
    model, rows = build_lm("llama"), draw_rows(33, 12, 21)
    plain, _ = generate(model, PLAIN, rows, kv_cache=METHOD)
    tree = mmaccel.Jacobi(window=4, tree=mmaccel.Comb(branches=2, length=3))
    made, _ = generate(model, tree, rows, kv_cache=METHOD)
    assert torch.equal(made, plain)


def test_speculate_reject_and_go_on() -> None:
    check_feed(METHOD, 2, replace(METHOD, rerotate=False))


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "queries stay where they were": lambda patch: patch.setattr(
        LayerStores, "to_positions", lambda self, positions: positions
    ),
    "keys stay where they were": lambda patch: patch.setattr(
        turning.KeyTurner, "turn_", lambda *given: None
    ),
    "the sine has the wrong sign": lambda patch: patch.setattr(
        turning, "turn", lambda keys, cos, sin, is_next, own=turning.turn: own(
            keys, cos, -sin, is_next
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    with pytest.raises(AssertionError):
        check(build_lm("llama"), PLAIN, METHOD)
