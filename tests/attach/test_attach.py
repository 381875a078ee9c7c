"""Attaching: what changes, what does not, and that detaching leaves no trace."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mmaccel
from mmaccel.errors import AttachError
from tests.fixtures.tiny_lms import build_lm, left_padded
from tests.fixtures.traces import trace_of

PROMPTS = left_padded([[5, 6], [4, 5, 6, 7], [9, 8, 7]])


def _use(model: Any, **options: Any) -> torch.Tensor:
    return model.generate(**PROMPTS, max_new_tokens=12, do_sample=True, **options)


def test_nothing_is_left_behind() -> None:
    model = build_lm("llama")
    before = trace_of(model)
    with mmaccel.attach(model, mmaccel.Jacobi(window=4)) as run:
        _use(model, top_k=5)
        model.generate(**PROMPTS, max_new_tokens=4, num_return_sequences=2, do_sample=True)
        with pytest.warns(UserWarning, match="beam search"):
            model.generate(**PROMPTS, max_new_tokens=4, num_beams=2)
        assert len(run.history) == 3
    assert trace_of(model) == before
    run.detach()
    assert trace_of(model) == before


def test_a_policy_and_its_model_are_freed_together() -> None:
    """The class of attached objects is kept for the life of the process: it holds no policy."""
    model, policy = build_lm("llama"), mmaccel.Jacobi(window=4)
    run = mmaccel.attach(model, policy)
    _use(model)
    dead = [weakref.ref(run), weakref.ref(policy), weakref.ref(model)]
    del model, policy, run
    gc.collect()
    assert [found() for found in dead] == [None] * 3


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


def test_a_second_attach_is_refused_and_the_first_goes_on() -> None:
    model = build_lm("llama")
    with mmaccel.attach(model, mmaccel.Jacobi(window=4)) as run:
        with pytest.raises(AttachError, match="detach it first"):
            mmaccel.attach(model, mmaccel.Autoregressive())
        _use(model)
        assert len(run.history) == 1
    with mmaccel.attach(model, mmaccel.Autoregressive()) as run:
        _use(model)
        assert run.stats.policy == "Autoregressive()"


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


def test_signature_type_and_keys_stay() -> None:
    from transformers import LlamaForCausalLM

    model = build_lm("llama")
    methods = ("generate", "_sample", "_beam_search", "_assisted_decoding", "forward")
    with mmaccel.attach(model, mmaccel.Jacobi(window=4)):
        assert isinstance(model, LlamaForCausalLM) and str(type(model)) == str(LlamaForCausalLM)
        for name in methods:
            expected = inspect.signature(getattr(LlamaForCausalLM, name))
            assert inspect.signature(getattr(type(model), name)) == expected
        assert list(model.state_dict()) == list(build_lm("llama").state_dict())


def test_the_model_in_a_compiled_wrapper_is_found() -> None:
    model = build_lm("llama")
    wrapper = torch.compile(model)  # compiles at its first call
    with mmaccel.attach(wrapper, mmaccel.Jacobi(window=4)) as run:
        wrapper.generate(**PROMPTS, max_new_tokens=4, do_sample=False)
        assert run.stats.fallbacks == [] and run.stats.passes >= 1
    assert type(model).__name__ == "LlamaForCausalLM" and mmaccel.supports(wrapper)


def test_a_policy_can_be_named() -> None:
    model = build_lm("llama")
    with mmaccel.attach(model, "jacobi", seed=1) as run:
        named = _use(model)
    with mmaccel.attach(model, mmaccel.Jacobi(), seed=1):
        assert torch.equal(named, _use(model))
    assert run.stats.policy == repr(mmaccel.Jacobi())
    assert repr(run) == f"Handle(LlamaForCausalLM, {mmaccel.Jacobi()!r}, 1 calls)"


@pytest.mark.parametrize("drawn", [None, -1])
def test_the_seed_of_a_call_is_in_its_stats(drawn: int | None) -> None:
    model = build_lm("llama")
    with mmaccel.attach(model, "jacobi", seed=drawn) as run:
        torch.manual_seed(4)
        first, second = (_use(model) for _ in range(2))
        model.generate(**PROMPTS, max_new_tokens=4, do_sample=False)
        seeds = [stats.seed for stats in run.history]
    assert isinstance(seeds[0], int) and seeds[0] != seeds[1] and seeds[2] is None
    for seed, made in zip(seeds, (first, second)):
        with mmaccel.attach(model, "jacobi", seed=seed) as run:
            assert torch.equal(_use(model), made) and run.stats.seed == seed


def test_supports_gives_the_reason() -> None:
    yes, no = mmaccel.supports(build_lm("gpt2")), mmaccel.supports(build_lm("lfm2"))
    assert yes and yes.family == "causal_lm" and yes.reason == ""
    assert not no and no.family is None and "layers of other kinds" in no.reason
    assert not mmaccel.supports(nn.Linear(1, 1)) and not mmaccel.supports(None)


def test_statistics_are_complete() -> None:
    model = build_lm("llama")
    with mmaccel.attach(model, mmaccel.Jacobi(window=6), seed=3) as run:
        out = model.generate(**PROMPTS, max_new_tokens=20, min_new_tokens=20, do_sample=True)
        assert out.shape == (3, 24)
        assert run.stats.to_dict() == run.history[0].to_dict()
        stats = run.stats.to_dict()
    assert stats["tokens"] == 60 and stats["exactness"] == "bitwise" and stats["fallbacks"] == []
    assert 4 <= stats["passes"] <= 20 and stats["prefill_passes"] == 1 and stats["seconds"] > 0
    assert stats["tokens_per_pass"] == 60 / stats["row_passes"]
