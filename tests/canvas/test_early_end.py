"""Early ends of canvas decoding: sure end tokens, converged blocks, budgets that buy nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import mmaccel
from mmaccel.contracts import CanvasPass
from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser
from mmaccel.results import Generation, add_stats
from mmaccel.samplers.canvas.early_end import ConvergedBlock, EosThreshold
from mmaccel.samplers.canvas.selector import SelectorState
from tests.fixtures import canvas as fixtures
from tests.fixtures.canvas import (
    independent,
    open_run,
    predictions_of,
    taken,
)

END = 2


class Recording(ReferenceDenoiser):
    """Records how many columns each pass attended to."""

    def forward(self, entries: CanvasPass) -> Tensor:
        self.__dict__.setdefault("n_read", []).append(int(entries.reads[0, 0].sum()))
        return super().forward(entries)


def ending_at(slot: int) -> Tensor:
    """Independent slots: from `slot` on end tokens with probability 0.97, before it a coin."""
    before, after = [0.5, 0.5, 0.0], [0.015, 0.015, 0.97]
    return independent(*[before if k < slot else after for k in range(6)])


def decode(policy: Any, model: Any, stops: bool = True) -> Generation:
    stop = [END, 99] if stops else None  # 99 is no id of the model's
    return fixtures.decode(policy, model, 6, temperature=0.0, stop=stop)


def test_the_first_sure_end_is_committed_and_slots_after_it_left_out() -> None:
    model, plain = Recording(ending_at(3)), Recording(ending_at(3))
    waits = decode(mmaccel.ConfidentParallel(1.0, block=6), plain)
    cut = decode(mmaccel.ConfidentParallel(1.0, end_threshold=0.9, drop_suffix=True), model)
    assert cut.lengths.tolist() == [4] == waits.lengths.tolist()
    assert torch.equal(cut.tokens, waits.tokens)
    # the end in the first pass, with the most confident slot, and three coins one by one
    assert model.n_read == [7, 5, 5] + [5] * (len(model.n_read) - 3)
    assert waits.stats.passes == len(plain.n_read) and set(plain.n_read) == {7}
    assert cut.stats.positions == 7 * cut.stats.passes  # computed all the same, without a cache


def test_the_first_end_that_is_sure_enough_is_taken() -> None:
    run = open_run(2)
    run.canvas.stop_tokens = torch.tensor([0, END])
    sure, both, other = [0.0, 0.0, 1.0], [0.4, 0.04, 0.56], [0.1, 0.9, 0.0]  # 0.96 end it in `both`
    first = [sure, other, other, other, both, sure]
    own = torch.tensor([first, [other, other, sure, other, other, sure]]).log()
    is_open = torch.tensor([[False, True, True, True, True, False], [True] * 6])
    seen = replace(predictions_of([[0.9] * 6] * 2, logits=own), is_open=is_open)
    state = SelectorState.of(run)
    assert taken(EosThreshold(0.9), seen, state) == [[4], [2]]
    assert taken(EosThreshold(0.98), seen, state) == [[], [2]]


def test_a_converged_block_is_taken_whole() -> None:
    state, rule = SelectorState.of(open_run(2)), ConvergedBlock(0.1)
    sure = torch.tensor([[0.0, 9.0, 0.0], [9.0, 0.0, 0.0]] * 3)[None]
    other = sure.roll(1, -1)
    low, high = [0.999] * 6, [0.6] * 6
    same, moved = torch.cat([sure, sure]), torch.cat([sure, other])
    every, none = list(range(6)), []  # type: ignore[var-annotated]
    assert taken(rule, predictions_of([low, low], logits=same), state) == [none, none]
    assert taken(rule, predictions_of([low, low], logits=moved), state) == [every, none]
    assert taken(rule, predictions_of([high, low], logits=moved), state) == [none, every]
    closed = predictions_of([low, low], closed=1, logits=moved)
    closed.logits[:, 1] = 0.0  # what is not open may change
    assert taken(rule, closed, state) == [[0, 2, 3, 4, 5]] * 2
    state.run.canvas.start = torch.tensor([1, 0])
    assert taken(rule, closed, state) == [none, [0, 2, 3, 4, 5]]


def test_a_converged_run_takes_two_passes_and_is_charged() -> None:
    joint = ending_at(6)
    joint = joint / joint.sum()
    sure = 0.999 * torch.zeros_like(joint)
    sure[(0, 1, 0, 1, 0, 1)] = 1.0
    joint = 0.02 * joint + 0.98 * sure
    slow = decode(mmaccel.ConfidentParallel(1.0), ReferenceDenoiser(joint), stops=False)
    fast = decode(
        mmaccel.ConfidentParallel(1.0, settled=0.2), ReferenceDenoiser(joint), stops=False
    )
    assert slow.stats.passes == 6 and fast.stats.passes == 2
    assert fast.tokens.tolist() == [[0, 1, 0, 1, 0, 1]] == slow.tokens.tolist()
    assert fast.stats.nats > 0 == slow.stats.nats


def test_a_budget_that_buys_nothing_is_noted() -> None:
    joint = ending_at(6)
    broke = decode(mmaccel.EntropyBounded(budget_nats=0.01), ReferenceDenoiser(joint))
    assert broke.stats.passes == 6 and broke.stats.nats == 0
    assert "budget_nats: 0.01 bought no second slot at any pass" in str(broke.stats)
    rich = decode(mmaccel.EntropyBounded(budget_nats=9.0), ReferenceDenoiser(joint))
    assert rich.stats.passes < 6 and not rich.stats.notes
    both = add_stats([broke.stats, rich.stats])  # which did spend something
    assert both.notes == [f"{broke.stats.notes[0]} (in 1 of 2 batches)"] and both.nats > 0
    assert add_stats([broke.stats, broke.stats]).notes == broke.stats.notes


def test_early_ends_are_relaxed() -> None:
    exact = mmaccel.MaskedParallel(None, order="halton")
    assert exact.exactness == "distribution"
    assert replace(exact, settled=0.1).exactness == "relaxed"
    assert replace(exact, drop_suffix=True).exactness == "relaxed"
    assert replace(exact, end_threshold=0.9).exactness == "relaxed"
