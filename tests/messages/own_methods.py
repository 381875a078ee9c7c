"""Methods of other people that answer something else than their contract says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mmaccel
from mmaccel.errors import NumericsError, ShapeError
from mmaccel.reduction.kv_cache.knorm import KNorm
from mmaccel.reduction.sparse_attention.quest import Quest
from mmaccel.samplers.canvas.policy import SelectorPolicy
from mmaccel.samplers.canvas.selector import AtLeast, LogitsOnly, Selector
from mmaccel.samplers.drafting.lengths.svip import SVIP
from mmaccel.samplers.trees.drawn import DrawnTree
from mmaccel.samplers.trees.rule_walk import choose_drawn
from mmaccel.samplers.trees.siblings.rsd import RSD
from tests.fixtures.denoiser_targets import llada
from tests.fixtures.tiny_lms import build_lm
from tests.messages.case import Refused

Change = Callable[[Any], Any]


def _own(base: type, method: str, change: Change, **fields: Any) -> Any:
    """A child `Own` of a class, whose method answers something else."""

    def answer(self: Any, *given: Any) -> Any:
        return change(getattr(base, method)(self, *given))

    return dataclass(frozen=True)(type("Own", (base,), {method: answer}))(**fields)


def _generate(policy: Any = "autoregressive", **methods: Any) -> Any:
    model = build_lm("llama")
    ids = torch.arange(4, 20).view(2, 8)
    with mmaccel.attach(model, policy, seed=0, strict=True, **methods):
        return model.generate(ids, do_sample=True, max_new_tokens=8, min_new_tokens=8)


def _speculate(length: Any) -> Any:
    drafts = mmaccel.DraftModel(build_lm("llama"), length=length)
    return _generate(mmaccel.Speculative(window=5, drafts=drafts))


def _choose(change: Change) -> Any:
    """One choice among two siblings."""
    tokens = torch.tensor([[0, 1, 2], [0, 3, 4]])
    even = torch.full((2, 3, 5), 0.2)
    children = torch.tensor([[1, 2], [-1, -1], [-1, -1]])
    tree = DrawnTree(tokens, tokens * 0, even, children, tokens >= 0)
    rule = _own(RSD, "choose", change)
    choose = choose_drawn(tree, rule, torch.full((2, 2, 2), 0.5), torch.full((2, 2), 0.5))
    return choose(torch.tensor([0, 0]), even[:, 0], 0)


def _fill(select: Change, rank: Change) -> Any:
    class Own(LogitsOnly):
        def select(self, predictions: Any, state: Any) -> Any:
            return select(predictions.is_open & (predictions.entropy < 0))

        def rank(self, predictions: Any) -> Any:
            return rank(predictions.peak)

    @dataclass(frozen=True)
    class Policy(SelectorPolicy):
        def selector(self, run: Any, state: Any) -> Selector:
            return AtLeast(1, Own())

    model = llada()
    with mmaccel.attach(model, Policy(), seed=0):
        return model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8)


def _same(found: Any) -> Any:
    return found


def _nan(found: Tensor) -> Tensor:
    return found * float("nan")


_QUEST = {"budget": 0.5, "block": 2, "first_layer": 0}
CASES = tuple(
    Refused(name, call, says, error)
    for name, call, says, error in (
        ("NaN scores of a cache",
         lambda: _generate(kv_cache=_own(KNorm, "score", _nan, budget=3)),
         ("Own.score: expected numbers, received NaN",), NumericsError),
        ("short summaries",
         lambda: _generate(attention=_own(Quest, "summarise", lambda x: x[:, :, 1:], **_QUEST)),
         ("Own.summarise: expected [2, ",), ShapeError),
        ("a short choice of siblings",
         lambda: _choose(lambda found: found._replace(tokens=found.tokens[:1])),
         ("Own.choose: expected [2] of int64, received [1]",), ShapeError),
        ("a length in integers", lambda: _speculate(_own(SVIP, "goes_on", Tensor.long)),
         ("Own.goes_on: expected [2] of bool, received [2] of torch.int64",), ShapeError),
        ("a selector of one axis", lambda: _fill(lambda found: found[0], _same),
         ("Own.select: expected [1, 8] of bool, received [8]",), ShapeError),
        ("a rank of NaN", lambda: _fill(_same, _nan),
         ("Own.rank: expected numbers, received NaN",), NumericsError),
    )
)  # fmt: skip
