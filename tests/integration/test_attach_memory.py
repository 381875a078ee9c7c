"""Functions of the caller's under a policy: those that remember earlier calls run the original,
those that do not are served, and no trial leaves a trace.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.errors import AttachError
from mmaccel.pipelines.processor_kinds import find_kind
from mmaccel.pipelines.trial import Trial
from tests.tiny_lms import build_lm, left_padded

PROMPTS = left_padded([[5, 6], [4, 5, 6, 7], [9, 8, 7]])
SHORT: dict[str, Any] = dict(max_new_tokens=12, do_sample=False)
CALLS: dict[int, int] = {}  # of functions of this module
TABLE = {7: [10, 11, 12], 6: [20, 21], 11: (30, 31)}
Make = Callable[[], Any]


def _count(calls: dict[int, int], row: int) -> list[int]:
    calls[row] = calls.get(row, -1) + 1
    return [20 + calls[row] % 5, 30 + calls[row] % 7]


class _Automaton:
    """Goes on by a state a call."""

    def __init__(self) -> None:
        self.calls: dict[int, int] = {}

    def __call__(self, row: int, ids: Tensor) -> list[int]:
        return _count(self.calls, row)

    def step(self, row: int, ids: Tensor) -> list[int]:
        return _count(self.calls, row)


class _Shared(_Automaton):
    """Its state is the class's."""

    held: dict[int, int] = {}

    def __call__(self, row: int, ids: Tensor) -> list[int]:
        return _count(self.held, row)


def _by_closure() -> Any:
    calls: dict[int, int] = {}
    return lambda row, ids: _count(calls, row)


def _by_nested_closure() -> Any:
    inner = _by_closure()
    return lambda row, ids: inner(row, ids)


def _by_number() -> Any:
    n = 0

    def allow(row: int, ids: Tensor) -> list[int]:
        nonlocal n
        n += 1
        return [20 + n % 5, 30 + n % 7]

    return allow


def _by_module(row: int, ids: Tensor) -> list[int]:
    return _count(CALLS, row)


def _by_default(row: int, ids: Tensor, calls: dict[int, int] = {}) -> list[int]:  # noqa: B006
    return _count(calls, row)


def _by_module_function(row: int, ids: Tensor) -> list[int]:
    return _by_module(row, ids)


def _by_attribute(row: int, ids: Tensor) -> list[int]:
    _by_attribute.calls = getattr(_by_attribute, "calls", 0) + 1  # type: ignore[attr-defined]
    return [20 + _by_attribute.calls % 5, 30]  # type: ignore[attr-defined]


def _by_held_attribute(row: int, ids: Tensor) -> list[int]:
    return _count(_by_held_attribute.calls, row)  # type: ignore[attr-defined]


_by_held_attribute.calls = {}  # type: ignore[attr-defined]


def _by_many_calls() -> Any:
    """Answers alike for a while."""
    calls: list[int] = []

    def allow(row: int, ids: Tensor) -> list[int]:
        calls.append(row)
        return [20 + len(calls) // 5 % 7, 30]

    return allow


def _by_iterator() -> Any:
    turns = iter([[20], [21]] * 500)
    return lambda row, ids: next(turns)


def _by_generator() -> Any:
    generator = torch.Generator().manual_seed(0)
    return lambda row, ids: [20 + int(torch.randint(5, (), generator=generator)), 30]


def _forget() -> None:
    CALLS.clear()
    _by_default.__defaults__[0].clear()  # type: ignore[index]
    _Shared.held.clear()
    vars(_by_attribute).clear()
    _by_held_attribute.calls.clear()  # type: ignore[attr-defined]


REMEMBER: dict[str, Make] = {
    "object": _Automaton,
    "class": _Shared,
    "method": lambda: _Automaton().step,
    "partial": lambda: partial(_count_row, {}),
    "closure": _by_closure,
    "nested closure": _by_nested_closure,
    "number": _by_number,
    "module": lambda: _by_module,
    "module's function": lambda: _by_module_function,
    "default": lambda: _by_default,
    "attribute": lambda: _by_attribute,
    "held attribute": lambda: _by_held_attribute,
    "many calls": _by_many_calls,
    "iterator": _by_iterator,
    "generator": _by_generator,
}


def _count_row(calls: dict[int, int], row: int, ids: Tensor) -> list[int]:
    return _count(calls, row)


class _Trie:
    """What may follow a token, or anything; looks back, remembers nothing."""

    def __init__(self, table: dict[int, Any]) -> None:
        self.table, self.all = table, list(range(40))

    def __call__(self, row: int, ids: Tensor) -> list[int]:
        return list(self.table.get(int(ids[-1]), self.all[row:]))


def _by_table(row: int, ids: Tensor) -> list[int]:
    return list(TABLE.get(int(ids[-1]), range(row, 40)))


def _by_expression(pattern: re.Pattern[str]) -> Any:
    allowed = [i for i in range(40) if pattern.fullmatch(str(i))]
    return lambda row, ids: allowed if pattern.search(str(int(ids[-1]))) else range(9, 15)


def _by_trie() -> Any:
    trie = _Trie(TABLE)
    return lambda row, ids: trie(row, ids)


FORGET: dict[str, Make] = {
    "object": lambda: _Trie(TABLE),
    "method": lambda: _Trie(TABLE).__call__,
    "closure": _by_trie,
    "module": lambda: _by_table,
    "expression": lambda: _by_expression(re.compile(r"1\d")),
    "partial": lambda: partial(lambda table, row, ids: _Trie(table)(row, ids), TABLE),
    "tensor": lambda: partial(lambda all, row, ids: all[int(ids[-1]) % 30 :], torch.arange(40)),
}


@pytest.mark.parametrize("where", ["option", "processor"])
@pytest.mark.parametrize("name", REMEMBER)
def test_what_remembers_runs_the_original(name: str, where: str) -> None:
    from transformers import LogitsProcessorList, PrefixConstrainedLogitsProcessor

    model = build_lm("llama")

    def options() -> dict[str, Any]:
        _forget()
        allow = REMEMBER[name]()
        if where == "option":
            return SHORT | {"prefix_allowed_tokens_fn": allow}
        processor = PrefixConstrainedLogitsProcessor(allow, 1)
        return SHORT | {"logits_processor": LogitsProcessorList([processor])}

    plain = model.generate(**PROMPTS, **options())
    with mmaccel.attach(model, mmaccel.Jacobi(window=8)) as run:
        with pytest.warns(UserWarning, match="may remember|which remembers|differently"):
            made = model.generate(**PROMPTS, **options())
    assert torch.equal(made, plain) and len(run.stats.fallbacks) == 1
    with mmaccel.attach(model, mmaccel.Jacobi(window=8), strict=True):
        with pytest.raises(AttachError, match="prefix_allowed_tokens_fn"):
            model.generate(**PROMPTS, **options())


@pytest.mark.parametrize("name", FORGET)
def test_what_does_not_is_served(name: str) -> None:
    model = build_lm("llama")
    options = SHORT | {"prefix_allowed_tokens_fn": FORGET[name]()}
    plain = model.generate(**PROMPTS, **options)
    with mmaccel.attach(model, mmaccel.Jacobi(window=8), strict=True) as run:
        assert torch.equal(model.generate(**PROMPTS, **options), plain)
    assert run.stats.fallbacks == [] and run.stats.passes <= 12


def _counted(ids: Tensor, scores: Tensor) -> Tensor:
    CALLS[0] = CALLS.get(0, 0) + 1
    return scores.roll(CALLS[0], -1)


def test_a_trial_of_a_processor_leaves_no_trace() -> None:
    model = build_lm("llama")
    _forget()
    plain = model.generate(**PROMPTS, **SHORT, logits_processor=[_counted])
    _forget()
    assert "which remembers" in find_kind(_counted, PROMPTS["input_ids"], torch.zeros(3, 40))
    assert CALLS == {}
    with mmaccel.attach(model, mmaccel.Jacobi(window=8)):
        with pytest.warns(UserWarning, match="which remembers"):
            made = model.generate(**PROMPTS, **SHORT, logits_processor=[_counted])
    assert torch.equal(made, plain)


def test_a_function_that_calls_itself_is_copied_once() -> None:
    def depth(n: int) -> int:
        seen.append(n)
        return 0 if n == 0 else 1 + depth(n - 1)

    seen: list[int] = []
    trial = Trial(depth)
    assert not trial.has_changed and trial.copy(3) == 3
    assert trial.has_changed and seen == []
