"""Reducers of other people: what they return is checked, and named in one line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.errors import ShapeError
from mmaccel.reduction.visual_tokens.context import VisualContext, make_context
from mmaccel.reduction.visual_tokens.contract import TokenReducer
from mmaccel.reduction.visual_tokens.plan import Plan, keep_tokens
from tests.fixtures.tiny_vlms import build_vlm, draw_prompts, encodes_first

ROWS, N = 2, 6


@dataclass(frozen=True)
class Own(TokenReducer):
    """Returns what a test gives it."""

    scores: ClassVar[Any] = torch.rand(ROWS, N)
    chosen: ClassVar[Any] = None
    changes: ClassVar[dict[str, Any]] = {}

    def score(self, context: VisualContext) -> Tensor:
        return self.scores

    def select(self, scores: Tensor, context: VisualContext, budget: Tensor) -> Any:
        if self.chosen is None:
            return replace(super().select(scores, context, budget), **self.changes)
        if isinstance(self.chosen, Tensor):
            return keep_tokens(self.chosen, context.valid, context.size)
        return self.chosen


def plan(monkeypatch: pytest.MonkeyPatch, **returns: Any) -> Plan:
    for name, value in returns.items():
        monkeypatch.setattr(Own, name, value)
    return Own(n_keep=2).plan(make_context(torch.zeros(ROWS, N, 4)))


@pytest.mark.parametrize(
    ("scores", "received"),
    [
        (torch.rand(ROWS, N, 1), r"\[2, 6, 1\] of torch.float32"),
        (torch.rand(N), r"\[6\] of torch.float32"),
        (torch.zeros(ROWS, N, dtype=torch.int64), r"\[2, 6\] of torch.int64"),
        ([0.5] * N, "a list"),
        (None, "a NoneType"),
    ],
)
def test_wrong_scores_are_named(scores: Any, received: str, monkeypatch: Any) -> None:
    expected = rf"^Own\.score: expected \[2, 6\] of floating point, .*, received {received}; see"
    with pytest.raises(ShapeError, match=expected):
        plan(monkeypatch, scores=scores)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (torch.tensor([[0, 1], [2, N]]), r"plan: expected indices below 6, .*, received 6;"),
        (torch.tensor([[0, 1]]), r"expected a mask \[2, 6\] of torch.bool or indices \[2, k\]"),
        (torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), r"received \[2, 2\] of torch.int32;"),
        (torch.ones(ROWS, N), r"received \[2, 6\] of torch.float32;"),
        ("the first two", "plan: expected a Plan, received a str; return keep_tokens"),
    ],
)
def test_a_wrong_choice_is_named(chosen: Any, said: str, monkeypatch: Any) -> None:
    with pytest.raises(ShapeError, match=rf"^Own\.select: .*{said}"):
        plan(monkeypatch, chosen=chosen)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"keep": torch.tensor([[0, 1], [2, N]])}, "expected keep below 6 tokens .*received 6 and"),
        ({"assign": torch.full((ROWS, N), 2)}, "assign below 2 slots, received . and 2;"),
        ({"assign": torch.zeros(ROWS, 5, dtype=torch.int64)}, r"plan.assign: expected \[2, 6\]"),
        ({"weight": torch.ones(ROWS, N).double()}, r"plan.weight: .* received \[2, 6\] of .*64;"),
        ({"size": torch.ones(ROWS, 1)}, r"plan.size: expected \[2, 2\] .* received \[2, 1\]"),
    ],
)  # fmt: skip
def test_a_wrong_plan_is_named(changes: dict[str, Any], said: str, monkeypatch: Any) -> None:
    with pytest.raises(ShapeError, match=rf"^Own\.select: .*{said}"):
        plan(monkeypatch, changes=changes)


def test_a_right_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan(monkeypatch, chosen=torch.tensor([[4, 0], [-1, 3]]))
    assert found.keep.tolist() == [[0, 4], [3, -1]]
    assert plan(monkeypatch, chosen=None).counts.tolist() == [2, 2]


@pytest.mark.skipif(
    not encodes_first(), reason="this transformers encodes images in its first pass"
)
def test_a_call_ends_with_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = build_vlm("llava")
    monkeypatch.setattr(Own, "scores", torch.rand(1, 3))
    with mmaccel.attach(vlm, "autoregressive", visual_tokens=Own(keep=0.5)):
        with pytest.raises(ShapeError, match=r"^Own\.score: expected \[\d, \d+\] of floating"):
            vlm.generate(**draw_prompts("llava", vlm), max_new_tokens=2, do_sample=False)
