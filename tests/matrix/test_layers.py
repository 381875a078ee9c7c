"""Every method of the catalog for caches and attention, under every window policy.

`tests/layers` compares each with a reference of its own; here is what all of them keep: a full
budget changes nothing, and says so; a row does not depend on its batch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.catalog import METHODS, load
from mmaccel.reduction.kv_cache.contract import CacheMethod
from mmaccel.reduction.kv_cache.headwise import HeadwiseMethod
from tests.fixtures.lanes import every
from tests.fixtures.tiny_lms import build_lm, shared_lm
from tests.layers.test_eviction import draw_rows, generate
from tests.layers.test_hidden_states import METHOD as BY_HIDDEN
from tests.matrix.examples import Target, identities, make, text_policies
from tests.matrix.layer_support import EVERY

ROUNDS: list[tuple[str, str, dict[str, Any]]] = [(slot, name, {}) for slot, name in EVERY] + [
    ("kv_cache", name, {"every": 5})
    for name, entry in METHODS["kv_cache"].items()
    if issubclass(load(entry.target), CacheMethod)
    and not issubclass(load(entry.target), HeadwiseMethod)
    and not load(entry.target).merges
]
PLAIN = mmaccel.Autoregressive()
LENGTHS = (26, 18, 30)  # scores of blocks tie


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(build_lm("llama"), build_lm("llama", num_hidden_layers=1))


def policy_of(name: str, target: Target) -> Any:
    """A policy of the catalog, which draws as the plain loop does."""
    given = {} if name == "autoregressive" else {"window": 5}
    return make("policies", name, target, **given)


@cache
def whole(model_name: str, fused: bool, sampled: bool) -> torch.Tensor:
    """The plain loop's tokens over the whole cache."""
    rows, given = draw_rows(40, 23, 31), {"fused": fused, "do_sample": sampled}
    tokens: torch.Tensor = generate(shared_lm(model_name), PLAIN, rows, **given)[0]
    return tokens


@pytest.mark.parametrize(("slot", "name"), EVERY)
def test_a_full_budget_changes_nothing(slot: str, name: str, target: Target) -> None:
    """Methods take turns on two models, fused and not."""
    number = EVERY.index((slot, name))
    model_name, fused = ("qwen2", "gemma3, deep")[number % 2], number // 2 % 2 == 0
    model, rows = shared_lm(model_name), draw_rows(40, 23, 31)
    for policy, sampled in ((PLAIN, False), (mmaccel.Jacobi(window=5), True)):
        for fields in identities(slot, name):
            method = make(slot, name, target, **fields)
            given: dict[str, Any] = {slot: method, "fused": fused, "do_sample": sampled}
            made, stats = generate(model, policy, rows, **given)
            assert torch.equal(made, whole(model_name, fused, sampled))
            assert stats.exactness == "bitwise" and stats.reference == ""


@pytest.mark.parametrize(("slot", "name", "fields"), every(5, ROUNDS))
def test_what_every_method_keeps(
    slot: str, name: str, fields: dict[str, Any], target: Target
) -> None:
    """Greedy, so that policies that are exact in distribution alone have one answer, too. Every
    other method is guided here, and under `Jacobi` each of them in `test_layer_support.py`, which
    also has each row alone, but for caches that are cut every few entries.
    """
    model, rows = target.model, draw_rows(*LENGTHS)
    number = ROUNDS.index((slot, name, fields))
    guidance = (1.0, 1.6)[number % 2]
    method = make(slot, name, target, **fields)
    guided: dict[str, Any] = {}
    if guidance > 1:
        guided["guidance_scale"] = guidance
        guided["negative_prompt_ids"] = torch.tensor(draw_rows(14, 14, 14))
    plain, own = generate(model, PLAIN, rows, **{slot: method}, **guided)
    assert not torch.equal(plain, generate(model, PLAIN, rows, **guided)[0])
    assert own.exactness == "relaxed" and type(method).__name__ in own.reference
    if fields and not guided:
        for row, ids in enumerate(rows):
            assert torch.equal(generate(model, PLAIN, [ids], **{slot: method})[0][0], plain[row])
    for policy in text_policies()[number // 2 % 2 :: 2]:
        options = guided | {slot: method}
        made, stats = generate(model, policy_of(policy, target), rows, **options)
        assert stats.exactness == "relaxed" and stats.fallbacks == []
        assert stats.passes <= own.passes
        # blocks of later passes are chosen for a whole window
        is_final = slot == "kv_cache" or method.chooses_prompts
        if is_final and policy != "gsd":
            assert torch.equal(made, plain) and stats.reference == own.reference


@pytest.mark.parametrize(("slot", "name"), every(5, [("kv_cache", "by hidden states"), *EVERY]))
def test_a_prompt_of_embeddings_is_served_like_its_ids(
    slot: str, name: str, target: Target
) -> None:
    """The model's own prefill processes it, its last token included, with padding on the left."""
    method = BY_HIDDEN if name == "by hidden states" else make(slot, name, target)
    if getattr(method, "repeated", 0):  # feeds ids, which embeddings do not have
        return
    model, rows = build_lm("qwen2"), draw_rows(*LENGTHS)
    plain = generate(model, PLAIN, rows, **{slot: method})[0]
    for policy in (PLAIN, mmaccel.Jacobi(window=5)):
        if slot == "attention" and (method.chooses_prompts or policy is not PLAIN):
            continue  # tiles of such prompts are proved in tests/layers/test_prompts.py
        made = generate(model, policy, rows, embeds=True, **{slot: method})[0]
        assert torch.equal(made, plain)
