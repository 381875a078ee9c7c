"""`mmaccel.decoder` for one call; models inside wrappers and pipelines; families of others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.catalog import find_family
from mmaccel.own_code import installed
from tests.fixtures.tiny_lms import PROMPTS, build_lm


def test_a_decoder_serves_calls_and_attaches_nothing() -> None:
    model = build_lm("llama")
    options: dict[str, Any] = dict(max_new_tokens=20, do_sample=False)
    plain = model.generate(**PROMPTS, **options)
    loop = mmaccel.decoder(mmaccel.Jacobi(window=6))
    assert loop.stats is None
    assert torch.equal(model.generate(**PROMPTS, **options, custom_generate=loop), plain)
    assert loop.stats is not None and loop.stats.fallbacks == []
    assert loop.stats.passes < plain.shape[1] - 4
    assert type(model).__name__ == "LlamaForCausalLM" and "_sample" not in vars(model)
    assert torch.equal(
        build_lm("gpt2").generate(**PROMPTS, **options, custom_generate=loop)[:, :4],
        PROMPTS["input_ids"],
    )
    assert len(loop.history) == 2


def test_a_seed_makes_it_the_attached_policys_draw() -> None:
    model, policy = build_lm("llama"), mmaccel.Jacobi(window=6)
    options: dict[str, Any] = dict(max_new_tokens=12, do_sample=True, top_k=9)
    with mmaccel.attach(model, policy, seed=[4, 5, 6], strict=True):
        wanted = model.generate(**PROMPTS, **options)
    loop = mmaccel.decoder(policy, seed=[4, 5, 6], strict=True)
    assert torch.equal(model.generate(**PROMPTS, **options, custom_generate=loop), wanted)


UNSERVED: dict[str, Any] = {
    "max_new_tokens": 6,
    "do_sample": False,
    "output_hidden_states": True,
    "use_cache": False,
    "return_dict_in_generate": True,
}


def test_what_it_cannot_serve_runs_the_original() -> None:
    model, loop = build_lm("llama"), mmaccel.decoder("jacobi")
    plain = model.generate(**PROMPTS, **UNSERVED)
    with pytest.warns(UserWarning, match="without a cache"):
        ours = model.generate(**PROMPTS, **UNSERVED, custom_generate=loop)
    assert torch.equal(ours.sequences, plain.sequences) and len(ours.hidden_states) == 6
    assert loop.stats is not None and "without a cache" in loop.stats.fallbacks[0]


def test_another_packages_family_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        find_family("llama")
        == find_family(None)
        == "mmaccel.pipelines.hosts.causal_lm.family:CausalLM"
    )
    found = [SimpleNamespace(name="llama", value="tests.fixtures.windows:build_model")]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found)
    installed.cache_clear()
    try:
        assert find_family("llama") == "tests.fixtures.windows:build_model"
        assert find_family("janus") == "mmaccel.pipelines.models.janus:Janus"
    finally:
        installed.cache_clear()
