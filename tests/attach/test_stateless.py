"""Processors of the caller's own: served if they are marked, otherwise the original loop runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.errors import AttachError
from tests.fixtures.tiny_lms import PROMPTS, VOCAB, build_lm

LENGTH = 12
GREEDY: dict[str, Any] = dict(max_new_tokens=LENGTH, do_sample=False)
GUIDANCE: dict[str, Any] = dict(
    guidance_scale=1.8, negative_prompt_ids=torch.tensor([[1], [1], [2]])
)
Make = Callable[[], Any]


class _Counted:
    """Counts its calls; the result depends on the row alone."""

    def __init__(self) -> None:
        self.calls = 0


class _Bonus(_Counted):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores + torch.linspace(0, 4, VOCAB) * (input_ids[:, -2:].sum(1, keepdim=True) % 3)

    def add(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self(input_ids, scores)


class _Grammar(_Counted):
    def __call__(self, row: int, ids: Tensor) -> list[int]:
        self.calls += 1
        return list(range(4 + (int(ids[-1]) + row) % 3, VOCAB, 3))

    def allow(self, row: int, ids: Tensor) -> list[int]:
        return self(row, ids)


class _Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, first: Any, second: Tensor) -> Any:
        return self.inner(first, second)


def _call(inner: Any, first: Any, second: Tensor) -> Any:
    return inner(first, second)


def _function(inner: Any) -> Any:
    def called(first: Any, second: Tensor) -> Any:
        return inner(first, second)

    return called


# Make a processor of a counting object.
FORMS: dict[str, Callable[[Any], Any]] = {
    "object": lambda inner: inner,
    "function": _function,
    "method": lambda inner: inner.add if isinstance(inner, _Bonus) else inner.allow,
    "slots": _Slotted,
}


def _options(where: str, given: Any) -> dict[str, Any]:
    return GREEDY | {where: [given] if where == "logits_processor" else given}


def _inner(where: str) -> _Counted:
    return _Bonus() if where == "logits_processor" else _Grammar()


@pytest.mark.parametrize("where", ["logits_processor", "prefix_allowed_tokens_fn"])
@pytest.mark.parametrize("form", FORMS)
def test_unmarked_runs_the_original_marked_is_served(form: str, where: str) -> None:
    model, inner = build_lm("llama"), _inner(where)
    given = FORMS[form](inner)
    plain = model.generate(**PROMPTS, **_options(where, given))
    assert not torch.equal(plain, model.generate(**PROMPTS, **GREEDY))
    n_calls, inner.calls = inner.calls, 0
    with mmaccel.attach(model, mmaccel.Jacobi(window=6)) as run:
        with pytest.warns(UserWarning, match="may remember earlier calls"):
            made = model.generate(**PROMPTS, **_options(where, given))
    assert torch.equal(made, plain) and inner.calls == n_calls  # nothing else called it
    assert len(run.stats.fallbacks) == 1
    inner.calls = 0
    with mmaccel.attach(model, mmaccel.Jacobi(window=6), strict=True) as run:
        with pytest.raises(AttachError, match=r"of the caller's own .*mmaccel\.stateless\("):
            model.generate(**PROMPTS, **_options(where, given))
        assert inner.calls == 0
        marked = mmaccel.stateless(given)
        assert torch.equal(model.generate(**PROMPTS, **_options(where, marked)), plain)
    assert run.stats.fallbacks == [] and inner.calls > 0


def test_transformers_own_are_never_assumed_stateless() -> None:
    from transformers import SynthIDTextWatermarkingConfig

    marks = SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3, context_history_size=8)
    model = build_lm("llama")
    plain = model.generate(**PROMPTS, **GREEDY, watermarking_config=marks)
    with mmaccel.attach(model, "jacobi", assume_stateless=True) as run:
        with pytest.warns(UserWarning, match="SynthIDText"):
            made = model.generate(**PROMPTS, **GREEDY, watermarking_config=marks)
    assert torch.equal(made, plain)
    assert run.stats.fallbacks == ["a SynthIDTextWatermarkLogitsProcessor"]


class _ByClass(_Bonus):
    is_stateless = True


@mmaccel.stateless
class _Decorated(_Grammar):
    pass


MARKS: dict[str, tuple[Make, Make, dict[str, Any]]] = {
    "function": (
        lambda: mmaccel.stateless(_Bonus()),
        lambda: mmaccel.stateless(_Grammar()),
        {},
    ),
    "class": (_ByClass, _Decorated, {}),
    "attach": (_Bonus, _Grammar, {"assume_stateless": True}),
}


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("mark", MARKS)
def test_each_mark_is_served_bit_for_bit(mark: str, guided: bool) -> None:
    processor, grammar, option = MARKS[mark]
    model = build_lm("qwen2")
    given = {"logits_processor": [processor()], "prefix_allowed_tokens_fn": grammar()}
    given |= GUIDANCE if guided else {}
    sampled = {"max_new_tokens": LENGTH, "do_sample": True, "top_k": 12}
    plain = model.generate(**PROMPTS, **GREEDY, **given)
    with mmaccel.attach(model, "autoregressive", seed=[4, 5, 6], strict=True, **option):
        drawn = model.generate(**PROMPTS, **sampled, **given)
    for window in (1, 3, 8):
        policy = mmaccel.Jacobi(window=window)
        with mmaccel.attach(model, policy, seed=[4, 5, 6], strict=True, **option) as run:
            assert torch.equal(model.generate(**PROMPTS, **GREEDY, **given), plain)
            assert torch.equal(model.generate(**PROMPTS, **sampled, **given), drawn)
        assert all(stats.fallbacks == [] and stats.passes <= LENGTH for stats in run.history)
    loop = mmaccel.decoder(mmaccel.Jacobi(window=8), strict=True, **option)
    assert torch.equal(model.generate(**PROMPTS, **GREEDY, **given, custom_generate=loop), plain)


def test_the_mark_is_an_attribute_or_a_wrapper() -> None:
    for given in (_Bonus(), _function(_Bonus()), partial(_call, _Bonus()), torch.nn.Identity()):
        marked: Any = mmaccel.stateless(given)
        assert marked is given and marked.is_stateless is True
    for given in (_Bonus().add, _Slotted(_Bonus())):
        wrapper: Any = mmaccel.stateless(given)
        assert wrapper is not given and wrapper.is_stateless is True
        assert mmaccel.stateless(wrapper) is wrapper
