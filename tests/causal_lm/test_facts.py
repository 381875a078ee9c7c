"""Facts of a model are found once, and again where it has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.pipelines.hosts.causal_lm import compatibility
from mmaccel.pipelines.hosts.causal_lm.compatibility import find_facts
from tests.fixtures.tiny_lms import build_lm, falls_back


def change_the_head(model: Any) -> None:
    model.resize_token_embeddings(model.config.vocab_size + 3)


def change_the_attention(model: Any) -> None:
    model.set_attn_implementation("eager")


def change_the_positions(model: Any) -> None:
    model.config.max_position_embeddings = 24


def test_calls_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signatures and configurations are read once, however many calls there are."""
    read: list[Any] = []
    own = compatibility.find_position_limit

    def count(model: Any) -> int | None:
        read.append(model)
        return own(model)

    monkeypatch.setattr(compatibility, "find_position_limit", count)
    model, prompt = build_lm("llama"), torch.tensor([[5, 6, 7]])
    with mmaccel.attach(model, "jacobi", strict=True):
        for _ in range(3):
            model.generate(prompt, max_new_tokens=3, do_sample=False)
    assert len(read) == 1


@pytest.mark.parametrize("change", [change_the_head, change_the_attention, change_the_positions])
def test_a_change_is_seen(change: Callable[[Any], None]) -> None:
    model = build_lm("llama")
    before = find_facts(model)
    assert find_facts(model) is before
    change(model)
    after = find_facts(model)
    assert after is not before and find_facts(model) is after
    linear = model.get_output_embeddings()
    limit = model.config.max_position_embeddings
    assert (after.n_ids, after.max_positions) == (linear.weight.shape[0], limit)


def test_a_limit_that_fell_holds_for_the_next_call() -> None:
    model, prompt = build_lm("llama"), torch.tensor([[5, 6, 7]])
    with falls_back(model, "more positions than the model's 24") as handle:
        model.generate(prompt, max_new_tokens=3, do_sample=False)
        assert handle.stats is not None and not handle.stats.fallbacks
        change_the_positions(model)
        model.generate(prompt, max_new_tokens=30, do_sample=False)


@pytest.mark.parametrize(("window", "fused"), [(9, True), (None, False)])
def test_masks_that_changed_hold_for_the_next_call(window: int | None, fused: bool) -> None:
    model, prompt = build_lm("mistral"), torch.tensor([[5, 6, 7]])
    options: dict[str, Any] = dict(max_new_tokens=20, do_sample=False, eos_token_id=None)
    with mmaccel.attach(model, "jacobi", strict=True, fused=fused):
        narrow = model.generate(prompt, **options)
        model.config.sliding_window = window
        wide = model.generate(prompt, **options)
    assert wide.equal(model.generate(prompt, **options)) and not wide.equal(narrow)
