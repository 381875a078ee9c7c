"""Revisers at their thresholds: who is taken back, replaced or redone, and who is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.contracts import Prompt
from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser
from mmaccel.samplers.canvas.revised_parallel import RevisedParallel
from mmaccel.samplers.canvas.revision import ShadowReviser
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from tests.canvas.test_selectors import run_of, seen_of
from tests.fixtures.kv_reference import StoreOracle

LENGTH, ROWS = 6, 8
PEAKS = [0.96, 0.88, 0.76, 0.68, 0.56, 0.44]


def apart(peaks: list[float]) -> Tensor:
    """A joint law of slots that know nothing of each other; token 0 has `peaks`."""
    joint = torch.ones((), dtype=torch.float64)
    for peak in peaks:
        lone = torch.tensor([peak, (1 - peak) / 2, (1 - peak) / 2], dtype=torch.float64)
        joint = joint[..., None] * lone
    return joint


def states_of(policy: Any, model: Any, temperature: float = 0.0, rows: int = 1) -> list[Tensor]:
    """What stood on the canvas behind every pass, -1 where nothing did."""
    ones, states = torch.ones(rows, dtype=torch.int64), []

    def note(progress: Any) -> None:
        states.append(torch.where(progress.is_committed, progress.tokens, -1))

    noise, params = Noise.from_seed(9, rows), SamplingParams(temperature=temperature)
    prompt = Prompt(torch.zeros(rows, 1, dtype=torch.int64), ones)
    policy.sample(model, prompt, LENGTH, params=params, noise=noise, on_step=note)
    return states


def open_in(states: list[Tensor]) -> list[list[int]]:
    return [(state[0] < 0).nonzero()[:, 0].tolist() for state in states]


def three_a_pass(self: ShadowReviser, seen: Any) -> Tensor:
    return torch.full_like(seen.slots[:, 0], 3)


@pytest.mark.parametrize(
    "least, taken_back",
    [(0.5, []), (0.75, []), (0.77, [2]), (0.87, [2]), (0.9, [1, 2]), (1.0, [1, 2])],
)
def test_a_shadow_takes_back_what_is_below_its_threshold(
    least: float, taken_back: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots 0 to 2, then 3 to 5; then two of those before may go, the least likely ones first."""
    monkeypatch.setattr(ShadowReviser, "most", three_a_pass)
    states = states_of(RevisedParallel(0.0, least=least), StoreOracle(apart(PEAKS)))
    assert open_in(states)[:2] == [[3, 4, 5], taken_back]


def test_a_block_begins_with_nothing_to_take_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two thirds of a block are new at its first pass, and the block before is full."""
    monkeypatch.setattr(ShadowReviser, "most", lambda self, seen: three_a_pass(self, seen) - 1)
    states = states_of(RevisedParallel(0.0, least=1.0, block=3), StoreOracle(apart(PEAKS)))
    assert open_in(states) == [[2, 3, 4, 5], [3, 4, 5], [5], []]


def test_a_pass_drafts_seven_tenths_but_5_to_20() -> None:
    reviser = ShadowReviser(run_of(), 0.9)  # type: ignore[arg-type]
    wanted = {1: 5, 5: 5, 8: 5, 9: 6, 11: 7, 16: 11, 23: 16, 29: 20, 33: 20, 64: 20, 256: 20}
    for n_open, most in wanted.items():
        assert reviser.most(seen_of([[0.5] * n_open])).tolist() == [most], n_open
    part = seen_of([[0.5] * 17], closed=3)  # what is not open does not count
    assert reviser.most(part).tolist() == [11]


def test_a_bold_pass_stays_within_what_the_reviser_allows() -> None:
    states = states_of(RevisedParallel(0.0, least=0.0), StoreOracle(apart(PEAKS)))
    assert open_in(states) == [[5], []]


class Drifting(ReferenceDenoiser):
    """Gives token 0 to an open slot, and then prefers token 1 with `chance`."""

    def __init__(self, chance: float) -> None:
        super().__init__(apart(PEAKS))
        self.chance = chance

    def forward(self, entries: Any) -> Tensor:
        self.passes += 1
        tokens = entries.tokens.gather(1, entries.queries)
        likeliest = torch.where(tokens == self.mask_token, 0, 1)
        rest = torch.full((*tokens.shape, 4), (1 - self.chance) / 2, dtype=torch.float64)
        law = rest.scatter(2, likeliest[..., None], self.chance)
        return law.log()  # the mask token's share is left out


@pytest.mark.parametrize("least", [0.0, 0.5, 0.59, 0.61, 0.9])
def test_an_edit_needs_a_probability_above_its_threshold(least: float) -> None:
    model = Drifting(0.6)
    states = states_of(RevisedParallel(0.0, "edit", least=least, budget=4), model)
    edits = [0, 1] if least < 0.6 else [0, 0]
    found = [int(state[0, 0]) for state in states]
    assert [state.tolist() for state in states] == [[[token] * LENGTH] for token in found]
    assert found[:2] == edits and model.passes == (3 if least < 0.6 else 2)


@pytest.mark.parametrize("least", [0.0, 0.4])
def test_a_pass_does_not_edit_what_it_drew(least: float) -> None:
    """A draw is seldom the likeliest token everywhere, and stands until a pass has seen it."""
    model = ReferenceDenoiser(apart([0.5] * LENGTH))
    edited = states_of(RevisedParallel(0.0, "edit", least=least, budget=0), model, 1.0, ROWS)
    plain = states_of(mmaccel.ConfidentParallel(0.0), model, 1.0, ROWS)
    assert len(edited) == 1 and torch.equal(edited[0], plain[0])
    assert 0.2 < float((plain[0] != 0).float().mean()) < 0.8


@pytest.mark.parametrize(
    "peaks, least, again",
    [
        ([0.95, 0.95, 0.5, 0.95, 0.95, 0.95], 0.9, [1, 2, 3]),
        ([0.95, 0.95, 0.5, 0.95, 0.95, 0.95], 0.4, []),
        ([0.95, 0.95, 0.5, 0.95, 0.95, 0.95], 0.96, [0, 1, 2, 3, 4, 5]),
        ([0.5, 0.95, 0.95, 0.95, 0.95, 0.7], 0.6, [0, 1]),
        ([0.5, 0.95, 0.95, 0.95, 0.95, 0.7], 0.8, [0, 1, 4, 5]),
    ],
)
@pytest.mark.parametrize("threshold", [0.0, 0.9, 1.0])
def test_redone_is_what_was_unsure_when_it_was_committed(
    peaks: list[float], least: float, again: list[int], threshold: float
) -> None:
    """Whether it was committed in the first pass or in one of its own; then one slot a pass."""
    states = states_of(
        RevisedParallel(threshold, "redo", least=least), ReferenceDenoiser(apart(peaks))
    )
    drafts = {0.0: 1, 0.9: 1 + sum(peak < 0.9 for peak in peaks), 1.0: LENGTH}[threshold]
    assert open_in(states)[drafts - 1] == again
    left = [len(slots) for slots in open_in(states)[drafts - 1 :]]
    assert left == list(range(len(again), -1, -1))
