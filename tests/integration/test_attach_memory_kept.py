"""What the caller's functions write to where no copy reaches, and do only now and then."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, TextStreamer

import mmaccel
from mmaccel.errors import AttachError
from mmaccel.pipelines.object_trial import ObjectTrial
from mmaccel.pipelines.processor_kinds import find_kind
from mmaccel.pipelines.trial import Trial
from mmaccel.pipelines.watch import watch
from tests.tiny_lms import build_lm, left_padded

PROMPTS = left_padded([[5, 6], [4, 5, 6, 7], [9, 8, 7]])
LONG: dict[str, Any] = dict(max_new_tokens=24, do_sample=False)
ALL, EVEN = list(range(40)), list(range(0, 40, 2))
SEEN: list[int] = []
module = types.ModuleType("of_the_caller")


class _Counter:
    n = 0


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def forward(self) -> int:
        self.n += 1
        return self.n


class _ByGlobal:
    def __call__(self, row: int, ids: Tensor) -> list[int]:
        SEEN.append(row)
        return EVEN if len(SEEN) > 9 else ALL


def _by_class(row: int, ids: Tensor) -> list[int]:
    _Counter.n += 1
    return EVEN if _Counter.n > 9 else ALL


def _by_foreign_module(row: int, ids: Tensor) -> list[int]:
    module.n += 1
    return EVEN if module.n > 9 else ALL


def _by_network() -> Any:
    net = _Net()
    return lambda row, ids: EVEN if net() > 9 else ALL


def _now_and_then() -> Any:
    """As a parser does that goes on at some tokens only."""
    seen: dict[int, int] = {}

    def allow(row: int, ids: Tensor) -> list[int]:
        if len(ids) > 8 and int(ids[-1]) % 2 == 0:
            seen[row] = seen.get(row, 0) + 1
        return EVEN if seen.get(row, 0) % 2 else ALL

    return allow


class _Late(LogitsProcessor):
    """Begins to count when the prefix is long."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.n += ids.shape[1] > 9
        return scores.roll(self.n, -1)


class _OfClass(LogitsProcessor):
    n = 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        type(self).n += 1
        return scores.roll(self.n, -1)


class _LateOfClass(LogitsProcessor):
    """Begins to count in its class when the prefix is long."""

    n = 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        type(self).n += ids.shape[1] > 9
        return scores.roll(self.n, -1)


class _OfModule(LogitsProcessor):
    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        SEEN.append(1)
        return scores.roll(len(SEEN), -1)


class _Random(LogitsProcessor):
    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        return scores + 5 * torch.rand_like(scores)


class _OtherRows(LogitsProcessor):
    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        return scores.roll(int(ids[:, -1].sum()), -1)


def _forget() -> None:
    _Counter.n = _OfClass.n = _LateOfClass.n = module.n = 0
    SEEN.clear()


def _allow(make: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    return lambda: {"prefix_allowed_tokens_fn": make()}


def _process(make: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    return lambda: {"logits_processor": [make()]}


CASES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "class": (_allow(lambda: _by_class), "which remembers"),
    "module": (_allow(lambda: _by_foreign_module), "which remembers"),
    "network": (_allow(_by_network), "which remembers"),
    "global of a method": (_allow(_ByGlobal), "which remembers"),
    "now and then": (_allow(_now_and_then), "as the run has shown"),
    "processor, late": (_process(_Late), "as the run has shown"),
    "processor, late, class": (_process(_LateOfClass), "as the run has shown"),
    "processor, class": (_process(_OfClass), "which remembers"),
    "processor, module": (_process(_OfModule), "which remembers"),
    "processor, random": (_process(_Random), "differently"),
    "processor, other rows": (_process(_OtherRows), "other rows than its own"),
}


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_original_runs_as_if_nothing_had_been_tried(name: str, samples: bool) -> None:
    make, reason = CASES[name]
    model = build_lm("llama")
    options = LONG | {"do_sample": samples}
    _forget()
    torch.manual_seed(3)
    plain = model.generate(**PROMPTS, **options, **make())
    _forget()
    torch.manual_seed(3)
    with mmaccel.attach(model, mmaccel.Jacobi(window=6)) as run:
        with pytest.warns(UserWarning, match=reason):
            made = model.generate(**PROMPTS, **options, **make())
    assert torch.equal(made, plain) and len(run.stats.fallbacks) == 1
    _forget()
    with mmaccel.attach(model, mmaccel.Jacobi(window=6), strict=True):
        with pytest.raises(AttachError, match=reason):
            model.generate(**PROMPTS, **options, **make())
    assert (_Counter.n, _OfClass.n, _LateOfClass.n, module.n, SEEN) == (0, 0, 0, 0, [])


def test_what_was_streamed_is_not_streamed_again() -> None:
    """Nobody can take it back, and a second run would begin at the first token."""
    model = build_lm("llama")

    class Streamer(TextStreamer):
        def __init__(self) -> None:
            self.got: list[int] = []

        def put(self, value: Tensor) -> None:
            self.got += value.flatten().tolist()

        def end(self) -> None:
            self.got.append(-1)

    one = {name: value[1:2] for name, value in PROMPTS.items()}
    expected, streamer = Streamer(), Streamer()
    model.generate(**one, **LONG, **CASES["processor, late"][0](), streamer=expected)
    with mmaccel.attach(model, mmaccel.Jacobi(window=6)):
        with pytest.raises(AttachError, match=r"tokens had been streamed; make this call without"):
            model.generate(**one, **LONG, **CASES["processor, late"][0](), streamer=streamer)
    assert 4 < len(streamer.got) < 20 and streamer.got == expected.got[: len(streamer.got)]


def test_the_originals_are_not_asked() -> None:
    """A policy asks about drafts, which a caller who counts must not see."""
    asked: list[int] = []

    class Quiet(LogitsProcessor):
        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            if self is quiet:
                asked.append(ids.shape[1])
            return scores.roll(int(ids.shape[1]), -1)

    quiet = Quiet()
    model = build_lm("llama")
    options = LONG | {"logits_processor": [quiet]}
    plain = model.generate(**PROMPTS, **options)
    asked.clear()
    with mmaccel.attach(model, mmaccel.Jacobi(window=6)) as run:
        made = model.generate(**PROMPTS, **options)
    assert torch.equal(made, plain)
    assert run.stats.fallbacks == [] and asked == []


def test_a_trial_draws_nothing() -> None:
    def draw(row: int, ids: Tensor) -> list[int]:
        return [int(torch.rand(()) * 9), random.randrange(9), int(np.random.rand() * 9)]

    states: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        if states:
            with Trial(draw).undone():
                assert len(draw(0, PROMPTS["input_ids"][0])) == 3
        states.append((float(torch.rand(())), random.random(), float(np.random.rand())))
    assert states[0] == states[1]


def test_watched_namespaces_are_put_back() -> None:
    class Held:
        number, words = 1, "one"
        listed: list[int] = [1, 2]
        named: dict[str, int] = {"a": 1}
        kinds: set[int] = {3}

    listed, named, kinds = Held.listed, Held.named, Held.kinds
    (first, *_) = watch(Held)
    assert not first.has_changed
    Held.number, Held.new = 2, 5  # type: ignore[attr-defined]
    Held.listed.append(3)
    Held.named["a"] = 2
    Held.kinds.add(4)
    del Held.words
    assert first.has_changed
    first.restore()
    assert (Held.number, Held.words, Held.listed, Held.named) == (1, "one", [1, 2], {"a": 1})
    assert Held.kinds == {3} and not hasattr(Held, "new") and not first.has_changed
    assert Held.listed is listed and Held.named is named and Held.kinds is kinds
    Held.listed = [1, 2]  # another one
    assert first.has_changed
    first.restore()
    assert Held.listed is listed


@pytest.mark.parametrize("change", [True, 1.0, "1", None])
def test_another_type_is_another_value(change: Any) -> None:
    class Held:
        number: Any = 1

    (first, *_) = watch(Held)
    Held.number = change
    assert first.has_changed


def test_libraries_are_not_watched() -> None:
    """They keep what they like; it is nothing a call means."""
    assert not list(watch(torch)) and not list(watch(LogitsProcessor))
    assert not list(watch(nn.Linear(2, 2))) and list(watch(_Net())) and list(watch(module))


def test_an_object_trial_leaves_its_original_alone() -> None:
    late = _Late()
    trial = ObjectTrial(late)
    with trial.undone():
        trial.copy(torch.zeros(1, 20, dtype=torch.int64), torch.zeros(1, 40))
    assert trial.has_changed and late.n == 0
    assert find_kind(late, PROMPTS["input_ids"], torch.zeros(3, 40)) == "prefix"


@pytest.mark.parametrize("row", [0, -1])
def test_who_looks_at_one_row_alone_is_found(row: int) -> None:
    """It answers that row rightly, whoever stands beside it."""

    class Looks(LogitsProcessor):
        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            return scores + ids[row, -2]

    told = find_kind(Looks(), PROMPTS["input_ids"], torch.zeros(3, 40))
    assert told == "a Looks, which looks at other rows than its own"


def test_who_goes_on_with_the_next_token_is_found_beforehand() -> None:
    """Before anything is streamed."""

    class Goes(LogitsProcessor):
        length = PROMPTS["input_ids"].shape[1]

        def __init__(self) -> None:
            self.state = 0

        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            if ids.shape[1] > self.length:
                self.state = int(ids[0, -1])
            return scores

    told = find_kind(Goes(), PROMPTS["input_ids"], torch.zeros(3, 40))
    assert told == "a Goes, which remembers earlier calls"
