"""Processors of the caller's own: served if they are marked, otherwise the original loop runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.errors import AttachError
from tests.fixtures.tiny_lms import PROMPTS, VOCAB, build_lm, falls_back

LENGTH = 12
GREEDY: dict[str, Any] = dict(max_new_tokens=LENGTH, do_sample=False)


class _Bonus:
    """A processor whose result depends on the row alone; it counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores + torch.linspace(0, 4, VOCAB) * (input_ids[:, -2:].sum(1, keepdim=True) % 3)

    def add(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self(input_ids, scores)


class _ByClass(_Bonus):
    is_stateless = True


class _Slotted:
    """An object that takes no attribute."""

    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, first: Any, second: Tensor) -> Any:
        return self.inner(first, second)


def _allow(row: int, ids: Tensor) -> list[int]:
    return list(range(4 + (int(ids[-1]) + row) % 3, VOCAB, 3))


@mmaccel.stateless
def _marked(row: int, ids: Tensor) -> list[int]:
    return _allow(row, ids)


@pytest.mark.parametrize("where", ["logits_processor", "prefix_allowed_tokens_fn"])
def test_unmarked_runs_the_original_marked_is_served(where: str) -> None:
    model, bonus = build_lm("llama"), _Bonus()
    unmarked = bonus.add if where == "logits_processor" else lambda row, ids: _allow(row, ids)

    def call(given: Any) -> Tensor:
        given = [given] if where == "logits_processor" else given
        made: Tensor = model.generate(**PROMPTS, **GREEDY, **{where: given})
        return made

    plain = call(unmarked)
    assert not torch.equal(plain, model.generate(**PROMPTS, **GREEDY))
    n_calls, bonus.calls = bonus.calls, 0
    with falls_back(model, "may remember earlier calls") as run:
        made = call(unmarked)
    assert torch.equal(made, plain) and bonus.calls == n_calls  # nothing else called it
    assert len(run.stats.fallbacks) == 1
    with mmaccel.attach(model, mmaccel.Jacobi(window=6), strict=True) as run:
        with pytest.raises(AttachError, match=r"of the caller's own .*mmaccel\.stateless\("):
            call(unmarked)
        assert bonus.calls == n_calls
        assert torch.equal(call(mmaccel.stateless(unmarked)), plain)
    assert run.stats.fallbacks == []


MARKS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "marks": (_ByClass, _marked, {}),
    "attach": (_Bonus, _allow, {"assume_stateless": True}),
}


@pytest.mark.parametrize(("mark", "guided"), [("marks", True), ("attach", False)])
def test_each_mark_is_served_bit_for_bit(mark: str, guided: bool) -> None:
    processor, grammar, option = MARKS[mark]
    model = build_lm("qwen2")
    given: dict[str, Any] = {
        "logits_processor": [processor()], "prefix_allowed_tokens_fn": grammar,
    }  # fmt: skip
    if guided:
        negative = torch.tensor([[1], [1], [2]])
        given |= {"guidance_scale": 1.8, "negative_prompt_ids": negative}
    sampled = {"max_new_tokens": LENGTH, "do_sample": True, "top_k": 12}
    plain = model.generate(**PROMPTS, **GREEDY, **given)
    with mmaccel.attach(model, "autoregressive", seed=[4, 5, 6], strict=True, **option):
        drawn = model.generate(**PROMPTS, **sampled, **given)
    policy = mmaccel.Jacobi(window=8)
    with mmaccel.attach(model, policy, seed=[4, 5, 6], strict=True, **option) as run:
        assert torch.equal(model.generate(**PROMPTS, **GREEDY, **given), plain)
        assert torch.equal(model.generate(**PROMPTS, **sampled, **given), drawn)
    assert all(stats.fallbacks == [] and stats.passes <= LENGTH for stats in run.history)
    loop = mmaccel.decoder(policy, strict=True, **option)
    assert torch.equal(model.generate(**PROMPTS, **GREEDY, **given, custom_generate=loop), plain)


def test_the_mark_is_an_attribute_or_a_wrapper() -> None:
    for given in (_Bonus(), lambda *inputs: 0, torch.nn.Identity()):
        marked: Any = mmaccel.stateless(given)
        assert marked is given and marked.is_stateless is True
    for given in (_Bonus().add, _Slotted(_Bonus())):
        wrapper: Any = mmaccel.stateless(given)
        assert wrapper is not given and wrapper.is_stateless is True
        assert mmaccel.stateless(wrapper) is wrapper


def test_transformers_own_are_never_assumed_stateless() -> None:
    from transformers import SynthIDTextWatermarkingConfig

    marks = SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3, context_history_size=8)
    model = build_lm("llama")
    plain = model.generate(**PROMPTS, **GREEDY, watermarking_config=marks)
    with falls_back(model, "SynthIDText", assume_stateless=True) as run:
        made = model.generate(**PROMPTS, **GREEDY, watermarking_config=marks)
    assert torch.equal(made, plain)
    assert run.stats.fallbacks == ["a SynthIDTextWatermarkLogitsProcessor"]
