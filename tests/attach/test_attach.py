"""Attaching: what changes, what does not, and that detaching leaves no trace."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from tests.fixtures.tiny_lms import PROMPTS, build_lm
from tests.fixtures.traces import trace_of


def _use(model: Any, **options: Any) -> torch.Tensor:
    return model.generate(**PROMPTS, max_new_tokens=12, do_sample=True, **options)


def test_a_policy_and_its_model_are_freed_together() -> None:
    """The class of attached objects is kept for the life of the process: it holds no policy."""
    model, policy = build_lm("llama"), mmaccel.Jacobi(window=4)
    run = mmaccel.attach(model, policy)
    _use(model)
    dead = [weakref.ref(run), weakref.ref(policy), weakref.ref(model)]
    del model, policy, run
    gc.collect()
    assert [found() for found in dead] == [None] * 3


def test_attached_models_of_one_class_keep_their_own_policies() -> None:
    """They share the class that has the replaced methods; a third model keeps its own."""
    one, other, third = (build_lm("llama") for _ in range(3))
    first = mmaccel.attach(one, mmaccel.Jacobi(window=4), seed=1)
    second = mmaccel.attach(other, "autoregressive", seed=1)
    assert type(one) is type(other) and type(third) is type(one).__bases__[0]
    made = [_use(model) for model in (one, other, third)]
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])
    assert [len(run.history) for run in (first, second)] == [1, 1]
    assert first.stats.policy != second.stats.policy
    first.detach()
    _use(one)
    _use(other)
    assert [len(run.history) for run in (first, second)] == [1, 2]


def test_a_policy_without_a_kept_handle_stays_until_detach() -> None:
    model = build_lm("llama")
    wrapper, before = torch.compile(model), trace_of(model)
    assert mmaccel.detach(model) is False
    handles = [weakref.ref(mmaccel.attach(model, mmaccel.Jacobi(window=4), seed=1))]
    gc.collect()
    assert _use(model).shape == (3, 16) and len(handles[0]().history) == 1
    assert mmaccel.detach(wrapper) is True and mmaccel.detach(model) is False
    assert trace_of(model) == before


def test_nothing_is_left_behind_by_an_exception() -> None:
    class Bang(Exception):
        pass

    def explode(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        if ids.shape[1] > 7:
            raise Bang
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    model = build_lm("llama")
    before = trace_of(model)
    with pytest.raises(Bang), mmaccel.attach(model, mmaccel.Jacobi(window=4)):
        _use(model, stopping_criteria=[explode])
    assert trace_of(model) == before
    with pytest.raises(Bang), mmaccel.attach(model, mmaccel.Jacobi(window=4)):
        _use(model, stopping_criteria=[explode], return_dict_in_generate=True, output_scores=True)
    assert trace_of(model) == before


def test_hooks_of_methods_go_with_the_policy() -> None:
    """Those of reducers: see tests/vision_language/test_hooks.py."""
    model = build_lm("llama")
    before = trace_of(model)
    methods = {
        "kv_cache": mmaccel.SnapKV(budget=3, window=2),
        "attention": mmaccel.Quest(0.5, 4, first_layer=0),
    }
    with mmaccel.attach(model, mmaccel.Jacobi(window=4), strict=True, **methods) as run:
        _use(model)
    assert run.stats.exactness == "relaxed"  # they had an effect
    assert trace_of(model) == before


def test_copies_pickles_and_saved_files_are_of_the_plain_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    model = build_lm("llama")
    with mmaccel.attach(model, mmaccel.Jacobi(window=4)):
        plain = [copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        model.save_pretrained(tmp_path)
    plain.append(AutoModelForCausalLM.from_pretrained(tmp_path))
    for one in plain:
        assert type(one) is LlamaForCausalLM
        assert one.generate.__func__ is LlamaForCausalLM.generate
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]
