"""Reducers of other people: what they return is taken where it is right.

What is wrong is named in one line, see `OWN` in tests/messages/calls.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.reduction.visual_tokens.context import VisualContext, make_context
from mmaccel.reduction.visual_tokens.contract import TokenReducer
from mmaccel.reduction.visual_tokens.plan import keep_tokens


@dataclass(frozen=True)
class Chosen(TokenReducer):
    """Keeps what it is told."""

    choice: tuple[tuple[int, ...], ...] = ()

    def score(self, context: VisualContext) -> Tensor:
        return torch.rand(2, 6)  # of no other context

    def select(self, scores: Tensor, context: VisualContext, budget: Tensor) -> Any:
        if not self.choice:
            return super().select(scores, context, budget)
        return keep_tokens(torch.tensor(self.choice), context.valid, context.size)


def test_a_right_one_is_taken() -> None:
    context = make_context(torch.zeros(2, 6, 4))
    found = Chosen(n_keep=2, choice=((4, 0), (-1, 3))).plan(context)
    assert found.keep.tolist() == [[0, 4], [3, -1]]
    assert Chosen(n_keep=2).plan(context).counts.tolist() == [2, 2]
