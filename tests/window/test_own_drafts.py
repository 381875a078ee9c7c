"""Draft sources of other people: the tokens stay, and what they propose is checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import mmaccel
from mmaccel import Autoregressive, DraftModel, GroupedSpeculative, Jacobi, SpeculativeJacobi
from mmaccel.pipelines.hosts.runner.engine import is_capturable
from mmaccel.samplers.drafting.contract import (
    Drafter,
    Drafts,
    DraftSource,
    Frontier,
    PassScores,
)
from tests.fixtures.tiny_lms import build_lm

N = 12


@dataclass(frozen=True)
class Last(DraftSource):
    """Draws from the scores of the last slot of the last pass."""

    def propose(self, frontier: Frontier) -> Drafts:
        rows = len(frontier.token_buffer)
        scores = frontier.last_scores
        if scores is None:
            scores = torch.zeros(rows, frontier.vocab_size)
        return Drafts(None, scores[:, None])


def generate(policy: Any, **options: Any) -> tuple[torch.Tensor, Any]:
    model, prompt = build_lm("llama"), torch.tensor([[5, 6, 7], [9, 8, 3]])
    given = {"do_sample": True, "max_new_tokens": N, "min_new_tokens": N} | options
    with mmaccel.attach(model, policy, seed=3) as run:
        made = model.generate(prompt, attention_mask=torch.ones_like(prompt), **given)
    return made[:, prompt.shape[1] :], run.stats


def test_a_draft_model_chooses_by_the_frozen_noise() -> None:
    """The target as its own draft model: every draft is right."""
    plain, _ = generate(Autoregressive())
    made, stats = generate(Jacobi(window=4, drafts=DraftModel(build_lm("llama"))))
    assert torch.equal(made, plain) and stats.passes == N // 4


def test_scores_are_those_of_neighbour_drafts() -> None:
    """The same proposals as `neighbour`: the same passes."""
    for policy in (Jacobi, SpeculativeJacobi, GroupedSpeculative):
        made, stats = generate(policy(window=6, drafts=Last()))
        wanted, other = generate(policy(window=6, drafts="neighbour"))
        assert torch.equal(made, wanted) and stats.accepted == other.accepted


def test_only_a_source_that_says_so_is_captured() -> None:
    @dataclass(frozen=True)
    class Captured(Last):
        is_capturable: ClassVar[bool] = True

    assert is_capturable(Jacobi()) and is_capturable(Jacobi(drafts=Captured()))
    assert not is_capturable(Jacobi(drafts=Last()))


@dataclass(frozen=True)
class Watching(DraftSource):
    """Proposes copies of token 0, and keeps what its drafter was told."""

    told: list[Any]
    reads_scores = True
    corrects = True

    def open(self, run: Any) -> Drafter:
        self.told.append(("model", run.model.vocab_size))
        return Watcher(self)


@dataclass(eq=False)
class Watcher(Drafter):
    def propose(self, run: Any) -> Drafts:
        return Drafts(torch.zeros_like(run.rows.slots[:, :-1]))

    def correct(self, run: Any, drafts: Any, noise: Any, distribution: Any = None) -> Any:
        self.source.told.append(("correct", drafts.shape, noise.shape))  # type: ignore[attr-defined]
        return drafts, distribution

    def observe(self, run: Any, scores: PassScores, noise: Any) -> None:
        shapes = scores.window.shape, scores.last.shape, noise.shape
        self.source.told.append(("observe", *shapes))  # type: ignore[attr-defined]

    def accepted(self, run: Any, n_new: torch.Tensor) -> None:
        self.source.told.append(("accepted", n_new.tolist()))  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", [Jacobi, SpeculativeJacobi], ids=lambda cls: cls.__name__)
def test_a_drafter_is_told_of_every_pass(policy: Any) -> None:
    """In the order of the contract; the tokens that it was told of are those that were made."""
    told: list[Any] = []
    made, stats = generate(policy(window=4, drafts=Watching(told)))
    (_, size), *steps = told
    assert [kind for kind, *_ in steps] == ["correct", "observe", "accepted"] * stats.passes
    assert steps[0][1:] == ((2, 3), (2, 3, size))
    assert steps[1][1:] == ((2, 4, size), (2, size), (2, 4, size))
    gained = torch.tensor([n_new for kind, n_new in steps[2::3]])
    assert gained.sum(0).tolist() == [made.shape[1]] * 2
