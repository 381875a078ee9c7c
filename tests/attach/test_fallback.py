"""Calls no policy can serve: the original runs, with one warning and a reason in the statistics."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.errors import AttachError
from mmaccel.pipelines.hosts.attach import sample_task
from mmaccel.pipelines.hosts.attach.fallback import count_passes
from mmaccel.pipelines.hosts.original_methods import has_own
from tests.fixtures.tiny_lms import PROMPTS, PassCounter, build_lm, falls_back

SHORT: dict[str, Any] = dict(max_new_tokens=6, do_sample=False)


Make = Callable[[Any], dict[str, Any]]
# what a call asks for: a reason, and its arguments
CASES: dict[str, tuple[str, Make]] = {
    "beams": ("beam search", lambda m: {"num_beams": 2}),
    "states of whole texts": (
        "without a cache",
        lambda m: {"output_hidden_states": True, "use_cache": False},
    ),
    "static attentions": (
        "output_attentions over a StaticCache",
        lambda m: {"output_attentions": True, "cache_implementation": "static"},
    ),
    "nothing to see": (
        "hides a whole row",
        lambda m: {"attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]])},
    ),
    "too long": ("more positions than the model's 96", lambda m: {"max_new_tokens": 94}),
}
UNRUNNABLE: dict[str, tuple[str, Make]] = {  # transformers refuses two; one needs an accelerator
    "guided holes": (
        "guidance with an attention mask that does more",
        lambda m: {
            "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 0, 1, 1], [0, 1, 1, 1]]),
            "guidance_scale": 1.5,
            "negative_prompt_ids": torch.ones(3, 1).long(),
        },
    ),
    "guided embeddings": (
        "guidance for a prompt without token ids",
        lambda m: {
            "input_ids": None,
            "guidance_scale": 1.5,
            "inputs_embeds": m.get_input_embeddings()(PROMPTS["input_ids"]).detach(),
        },
    ),
    "guidance": (
        "one per row",
        lambda m: {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[1, 2]])},
    ),
    "offloaded": (
        "a cache of its own kind .DynamicCache",
        lambda m: {"cache_implementation": "offloaded"},
    ),
}


def _generate(model: Any, options: dict[str, Any]) -> Tensor:
    needs_dict = any(name.startswith("output_") for name in options)
    out = model.generate(**(PROMPTS | SHORT | options), return_dict_in_generate=needs_dict)
    return out.sequences if needs_dict else out


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_the_original_runs_with_one_warning(name: str) -> None:
    reason, make = CASES[name]
    model = build_lm("llama", attn_implementation="eager")
    with PassCounter(model) as counter:
        plain = _generate(model, make(model))
    with mmaccel.attach(model, mmaccel.Jacobi(window=4)) as run:
        for n_warnings in (1, 0):  # the second call warns no more, and has statistics too
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert torch.equal(_generate(model, make(model)), plain)
            warned = [w.filename for w in caught if "mmaccel" in str(w.message)]
            assert warned == [__file__] * n_warnings
    assert len(run.history) == 2
    for stats in run.history:
        assert len(stats.fallbacks) == 1 and stats.exactness == "bitwise"
        assert re.search(reason, stats.fallbacks[0])
        assert stats.passes == counter.passes and stats.tokens > 0 and stats.seconds > 0
        assert stats.policy == repr(mmaccel.Jacobi(window=4))


@pytest.mark.parametrize("name", ["beams", "too long", *UNRUNNABLE])
def test_strict_raises_and_names_the_reason(name: str) -> None:
    reason, make = (CASES | UNRUNNABLE)[name]
    model = build_lm("llama", attn_implementation="eager")
    with mmaccel.attach(model, mmaccel.Jacobi(window=4), strict=True) as run:
        with pytest.raises(AttachError, match=f"received .*({reason})"):
            _generate(model, make(model))
        assert run.history == []


def test_training_modes_that_change_the_pass_run_the_original() -> None:
    model = build_lm("llama")
    model.model.layers[0].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.5))
    with mmaccel.attach(model.train(), mmaccel.Jacobi(window=4)) as run:
        with pytest.warns(UserWarning, match="dropout"):
            model.generate(**PROMPTS, **SHORT)
        model.eval()
        model.generate(**PROMPTS, **SHORT)
        model.train().gradient_checkpointing_enable()
        model.model.layers[0].mlp.act_fn = torch.nn.SiLU()
        with pytest.warns(UserWarning, match="gradient checkpointing"):
            model.generate(**PROMPTS, **SHORT)
    assert [bool(stats.fallbacks) for stats in run.history] == [True, False, True]


def test_what_a_call_alone_can_tell_runs_the_original() -> None:
    model, other = build_lm("llama"), build_lm("llama", vocab_size=41)
    plain, policy = _generate(model, {}), mmaccel.Speculative(window=4, draft_model=other)
    with falls_back(model, "expected a vocabulary of 40, received 41", policy) as run:
        assert _generate(model, {}).equal(plain)
    assert len(run.history) == 1


def test_an_error_of_a_grammar_is_raised_if_its_prefix_is_accepted() -> None:
    @mmaccel.stateless
    def allow(row: int, ids: Tensor) -> list[int]:
        return [] if row == 1 and len(ids) == 8 else [5, 6, 7]

    options = SHORT | {"prefix_allowed_tokens_fn": allow}
    model = build_lm("llama")
    with pytest.raises(ValueError, match="empty list for batch ID 1"):
        model.generate(**PROMPTS, **options)
    for window in (1, 32):
        with mmaccel.attach(model, mmaccel.Jacobi(window=window), strict=True) as run:
            with pytest.raises(ValueError, match="empty list for batch ID"):
                model.generate(**PROMPTS, **options)
            model.generate(**PROMPTS, **(options | {"max_new_tokens": 4}))
            assert len(run.history) == 1


def test_a_loop_of_the_callers_own_is_noticed() -> None:
    def own(model: Any, input_ids: Tensor, *args: Any, **options: Any) -> Tensor:
        return torch.cat([input_ids, input_ids[:, -1:]], 1)

    model = build_lm("llama")
    with mmaccel.attach(model, mmaccel.Jacobi(window=4)) as run:
        with pytest.warns(UserWarning, match="not transformers' own") as caught:
            out = model.generate(**PROMPTS, **SHORT, custom_generate=own)
        assert caught[-1].filename == __file__
        model.generate(**PROMPTS, **SHORT)
    assert out.shape == (3, 5)
    assert [bool(stats.fallbacks) for stats in run.history] == [True, False]


def test_counters_of_two_threads_leave_the_callers_own_method() -> None:
    """Passes are counted in an attribute of the model, which another thread may replace."""
    model, calls = build_lm("llama"), []
    model.prepare_inputs_for_generation = lambda *args, **options: calls.append(args)
    for first_ends_first in (True, False):
        blocks = [count_passes(model) for _ in range(2)]
        counters = [block.__enter__() for block in blocks]
        model.prepare_inputs_for_generation(7)
        assert [counter.passes for counter in counters] == [1, 1]
        for block in blocks if first_ends_first else blocks[::-1]:
            block.__exit__(None, None, None)
        assert has_own(model, "prepare_inputs_for_generation")
    model.prepare_inputs_for_generation(8)
    assert calls == [(7,), (7,), (8,)]


def test_a_seed_reaches_the_fallback_and_leaves_torchs_generator_alone() -> None:
    model = build_lm("llama")
    sampled: dict[str, Any] = dict(
        max_new_tokens=8, do_sample=True, output_hidden_states=True, use_cache=False
    )

    def use(seed: Any) -> Tensor:
        with warnings.catch_warnings(), mmaccel.attach(model, "jacobi", seed=seed) as run:
            warnings.simplefilter("ignore")
            out = model.generate(**PROMPTS, **sampled, return_dict_in_generate=True)
        assert run.stats is not None and len(run.stats.fallbacks) == 1
        return out.sequences

    torch.manual_seed(11)
    plain = model.generate(**PROMPTS, **sampled, return_dict_in_generate=True).sequences
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert torch.equal(use(11), plain)
    assert torch.equal(use([4, 5, 6]), use([4, 5, 6]))
    assert not torch.equal(use([4, 5, 6]), use([4, 5, 7]))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(use(None), use(None))


@pytest.mark.parametrize("version", ["5.24.0", "9.1.0"])
def test_a_function_that_a_new_release_changed_runs_the_original(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(*args: Any, **options: Any) -> Any:
        raise TypeError("hand_over() got an unexpected keyword argument")

    model = build_lm("llama")
    plain = model.generate(**PROMPTS, **SHORT)
    monkeypatch.setattr("mmaccel.pipelines.hosts.attach.generate.VERSION", version)
    with mmaccel.attach(model, "jacobi") as run:
        monkeypatch.setattr(sample_task, "hand_over", changed)
        if version == "5.24.0":  # a tested release: an error of ours
            with pytest.raises(TypeError, match="hand_over"):
                model.generate(**PROMPTS, **SHORT)
            return
        with pytest.warns(UserWarning, match="not tested with transformers 9.1.0"):
            made = model.generate(**PROMPTS, **SHORT)
    assert made.equal(plain) and run.stats is not None
    assert "TypeError: hand_over() got an unexpected" in run.stats.fallbacks[0]


@pytest.mark.slow
def test_continuous_batching_of_transformers_is_not_watched() -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = build_lm("llama")
    config = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=3, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=16)  # else most of the memory
    batch: Any = partial(
        model.generate_batch, generation_config=config, continuous_batching_config=small
    )
    with mmaccel.attach(model, "jacobi") as run, warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.warns(UserWarning, match="continuous batching; generate takes a") as seen:
            for _ in range(2):
                out = batch([[5, 6], [7]])
                assert len(out) == 2
        assert len([w for w in seen if "without the policy" in str(w.message)]) == 1
        assert run.history == []
