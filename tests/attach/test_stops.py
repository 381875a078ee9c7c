"""Stopping criteria, end tokens inside a window, streamers and output objects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from tests.fixtures.tiny_lms import EOS, PAD, PROMPTS, VOCAB, build_lm

POLICIES = [mmaccel.Autoregressive(), mmaccel.Jacobi(window=5)]


class _Recorder:
    """A streamer that records its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu"
        self.calls.append(value.tolist())

    def end(self) -> None:
        self.calls.append("end")


class _CallLog:
    """A criterion that counts and records its calls, and so depends on their number and order."""

    def __init__(self, stops: dict[int, int]) -> None:
        self.stops, self.seen = stops, []  # type: ignore[var-annotated]

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.seen.append((input_ids.tolist(), scores))
        calls = len(self.seen)
        return torch.tensor([self.stops.get(row, 99) <= calls for row in range(len(input_ids))])


def _build_tokenizer() -> Any:
    """Words w00 … w39 for the ids; id 0 is a word that transformers itself looks up."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"abcdef": 0} | {f"w{index:02d}": index for index in range(1, VOCAB)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "abcdef")))


def _both(model: Any, policy: Any, make: Any = dict, **options: Any) -> tuple[Any, Any, Any]:
    """Plain output, output with the policy, statistics; `make()` gives fresh arguments to each."""
    plain = model.generate(**PROMPTS, do_sample=False, **make(), **options)
    with mmaccel.attach(model, policy, strict=True) as run:
        ours = model.generate(**PROMPTS, do_sample=False, **make(), **options)
    return plain, ours, run.stats


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_an_end_token_inside_a_window_ends_its_row(policy: Any) -> None:
    model = build_lm("llama")
    ends = model.generate(**PROMPTS, max_new_tokens=30, do_sample=False, eos_token_id=None)
    # ids at different slots of the rows, so that rows end at different times
    for eos in (int(ends[0, 6]), [int(ends[1, 7]), int(ends[2, 11])]):
        plain, ours, stats = _both(model, policy, max_new_tokens=30, eos_token_id=eos)
        assert torch.equal(ours, plain)
        n_real = 0
        stops = torch.tensor([eos]).flatten()
        for row in ours[:, 4:]:
            hits = torch.isin(row, stops).nonzero().flatten().tolist()
            end = hits[0] + 1 if hits else len(row)
            assert row[end:].tolist() == [PAD] * (len(row) - end)
            n_real += end
        assert stats.tokens == n_real


@pytest.mark.parametrize("eos", [EOS, None])
def test_a_criterion_is_called_as_transformers_calls_it(eos: int | None) -> None:
    model = build_lm("llama")
    for stops in ({0: 4, 1: 9, 2: 6}, {1: 5}):
        logs: list[_CallLog] = []

        def make(stops: dict[int, int] = stops, logs: list[_CallLog] = logs) -> dict[str, Any]:
            logs.append(_CallLog(stops))
            return {"stopping_criteria": [logs[-1]]}

        plain, ours, _ = _both(model, POLICIES[1], make, max_new_tokens=14, eos_token_id=eos)
        assert torch.equal(ours, plain)
        assert logs[1].seen == logs[0].seen


def test_stop_strings() -> None:
    tokenizer, model = _build_tokenizer(), build_lm("llama")
    made = model.generate(**PROMPTS, max_new_tokens=14, do_sample=False)
    wanted = f"w{int(made[1, 8]):02d}"
    plain, ours, stats = _both(
        model, POLICIES[1], max_new_tokens=14, stop_strings=[wanted], tokenizer=tokenizer
    )
    assert torch.equal(ours, plain) and stats.tokens < made[:, 4:].numel()


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_streamer_gets_the_same_tokens(policy: Any) -> None:
    model = build_lm("llama")
    eos = int(model.generate(**PROMPTS, max_new_tokens=9, do_sample=False)[0, 7])
    recorders: list[_Recorder] = []

    def make() -> dict[str, Any]:
        recorders.append(_Recorder())
        return {"streamer": recorders[-1]}

    plain, ours, _ = _both(model, policy, make, max_new_tokens=14, eos_token_id=eos)
    assert torch.equal(ours, plain)
    assert recorders[0].calls == recorders[1].calls
    assert recorders[1].calls[0] == PROMPTS["input_ids"].tolist()
    assert len(recorders[1].calls) == 2 + ours.shape[1] - 4 and recorders[1].calls[-1] == "end"


def test_max_length_counts_the_padded_prompt_and_static_caches_are_served() -> None:
    model = build_lm("llama")
    for options in ({"max_length": 11}, {"max_new_tokens": 7, "cache_implementation": "static"}):
        plain, ours, stats = _both(model, mmaccel.Jacobi(window=4), **options)
        assert torch.equal(ours, plain) and ours.shape == (3, 11) and stats.fallbacks == []
