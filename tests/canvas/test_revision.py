"""Revisers: what a shadow sees, what is taken back, replaced or redone at which threshold, and that
every run ends.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser
from mmaccel.samplers.canvas.revised_parallel import RevisedParallel
from mmaccel.samplers.canvas.revision import ShadowPass, ShadowReviser
from tests.fixtures.canvas import (
    canvases,
    decode,
    independent,
    open_run,
    predictions_of,
)
from tests.fixtures.joints import families
from tests.fixtures.kv_reference import KVReference
from tests.fixtures.lanes import every

LENGTH, ROWS = 6, 6
JOINTS = {name: 0.02 / 3**LENGTH + 0.98 * joint for name, joint in families(LENGTH, 3).items()}
REVISED = [
    RevisedParallel(0.0, least=1.0),
    RevisedParallel(0.2, block=3),
    RevisedParallel(0.0, "edit", least=0.0, budget=4),
    RevisedParallel(0.3, "edit", least=0.1, block=3, budget=2),
    RevisedParallel(0.0, "redo", least=1.0),
    RevisedParallel(0.4, "redo", block=2),
]


def apart(peaks: list[float]) -> Tensor:
    """Independent slots; token 0 has `peaks`."""
    return independent(*[[peak, (1 - peak) / 2, (1 - peak) / 2] for peak in peaks])


PEAKS = apart([0.96, 0.88, 0.76, 0.68, 0.56, 0.44])


def limit_commits(patch: pytest.MonkeyPatch, n: int) -> None:
    """Let a pass commit n slots."""
    most = lambda self, predictions: torch.full_like(predictions.slots[:, 0], n)  # noqa: E731
    patch.setattr(ShadowReviser, "max_commits", most)


def open_after(policy: Any, model: Any) -> list[list[int]]:
    """Open slots of one row after every pass."""
    states = canvases(policy, model, LENGTH, temperature=0.0, noise=9)
    return [(state[0] < 0).nonzero()[:, 0].tolist() for state in states]


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("cache", ["none", "dual", "prefix"])
def test_a_shadow_sees_everything_but_the_token_it_checks(
    cache: str, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = KVReference(JOINTS["markov"], shift=shift)
    found = []
    forward = ShadowPass.forward

    def spy(self: ShadowPass, canvas: Any, copies: int) -> Any:
        result = forward(self, canvas, copies)
        found.append((canvas.tokens.clone(), canvas.start.clone(), self.left_out.clone()))
        return result

    monkeypatch.setattr(ShadowPass, "forward", spy)
    limit_commits(monkeypatch, 2)
    decode(RevisedParallel(0.0, least=0.5, block=3, cache=cache), model, LENGTH, ROWS, noise=3)
    checked = 0
    for seen, (canvas, start, left_out) in zip(model.seen, found, strict=True):
        slots = start[:, None] + torch.arange(3)
        for row in range(ROWS):
            for index, slot in enumerate(slots[row].tolist()):
                if slot >= LENGTH or canvas[row, slot] == model.mask_token:
                    continue
                rest = canvas[row].clone()
                rest[slot] = model.mask_token
                assert torch.equal(seen[row, 3 + index], rest)
                agrees = (model.table == rest) | (rest == model.mask_token)
                weight = agrees.all(1) * model.joint.flatten()
                wanted = weight[model.table[:, slot] == canvas[row, slot]].sum() / weight.sum()
                assert float(left_out[row, index]) == pytest.approx(float(wanted), abs=1e-5)
                checked += 1
        assert (seen[:, :3] == canvas[:, None]).all()  # no other entry sees a shadow
    assert checked > 10


@pytest.mark.parametrize("policy", every(2, REVISED), ids=repr)
def test_every_run_ends_in_the_passes_its_docstring_gives(policy: RevisedParallel) -> None:
    block = policy.block or LENGTH
    bound = {"shadow": LENGTH, "edit": LENGTH + LENGTH // block * policy.budget, "redo": 2 * LENGTH}
    for name, joint in JOINTS.items():
        for temperature in (0.0, 1.5):
            model = KVReference(joint)
            run = decode(policy, model, LENGTH, ROWS, temperature=temperature, noise=3)
            assert run.stats.passes <= bound[policy.revise], name
            assert (run.tokens < 3).all() and (run.tokens >= 0).all()
            assert run.lengths.tolist() == [LENGTH] * ROWS


def test_two_commits_and_one_taken_back_still_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check fails; what a pass takes back is one less than the pass before committed."""
    limit_commits(monkeypatch, 2)
    policy, model = RevisedParallel(0.0, least=1.0), KVReference(JOINTS["markov"])
    states = canvases(policy, model, LENGTH, ROWS, noise=3)
    filled = [(state >= 0).sum(1).tolist() for state in states]
    assert filled == [[n] * ROWS for n in (2, 3, 4, 5, 6)]
    back = [((a >= 0) & (b < 0)).sum(1) for a, b in zip(states, states[1:], strict=False)]
    assert [n.tolist() for n in back[:3]] == [[1] * ROWS] * 3


@pytest.mark.parametrize(
    "least, taken_back", [(0.5, []), (0.75, []), (0.77, [2]), (0.87, [2]), (1.0, [1, 2])]
)
def test_a_shadow_takes_back_what_is_below_its_threshold(
    least: float, taken_back: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots 0 to 2, then 3 to 5; then two of those before may go, the least likely ones first."""
    limit_commits(monkeypatch, 3)
    found = open_after(RevisedParallel(0.0, least=least), KVReference(PEAKS))
    assert found[:2] == [[3, 4, 5], taken_back]


def test_a_shadow_pass_commits_seven_tenths_but_5_to_20() -> None:
    reviser = ShadowReviser(open_run(), 0.9)  # type: ignore[arg-type]
    for n_open, most in {1: 5, 8: 5, 9: 6, 16: 11, 29: 20, 256: 20}.items():
        assert reviser.max_commits(predictions_of([[0.5] * n_open])).tolist() == [most], n_open
    part = predictions_of([[0.5] * 17], closed=3)  # what is not open does not count
    assert reviser.max_commits(part).tolist() == [11]
    assert open_after(RevisedParallel(0.0, least=0.0), KVReference(PEAKS)) == [[5], []]


class Drifting(ReferenceDenoiser):
    """Predicts token 0 for an open slot, and the next token for a filled one, with `chance`."""

    def __init__(self, chance: float) -> None:
        super().__init__(PEAKS)
        self.chance = chance

    def forward(self, entries: Any) -> Tensor:
        self.passes += 1
        tokens = entries.tokens.gather(1, entries.queries)
        likeliest = torch.where(tokens == self.mask_token, 0, (tokens + 1) % 3)
        rest = torch.full((*tokens.shape, 4), (1 - self.chance) / 2, dtype=torch.float64)
        return rest.scatter(2, likeliest[..., None], self.chance).log()  # the mask token's is extra


@pytest.mark.parametrize("least", [0.0, 0.59, 0.61, 0.9])
def test_an_edit_needs_a_probability_above_its_threshold(least: float) -> None:
    for budget in (0, 1, 5):
        model = Drifting(0.6)
        policy = RevisedParallel(0.0, "edit", least=least, budget=budget)
        states = canvases(policy, model, LENGTH, temperature=0.0)
        edits = budget if least < 0.6 else min(budget, 1)  # a pass without an edit is the last
        assert model.passes == len(states) == 1 + edits
        assert states[-1].tolist() == [[edits % 3 if least < 0.6 else 0] * LENGTH]


@pytest.mark.parametrize(
    "peaks, least, again",
    [
        ([0.95, 0.95, 0.5, 0.95, 0.95, 0.95], 0.9, [1, 2, 3]),
        ([0.95, 0.95, 0.5, 0.95, 0.95, 0.95], 0.4, []),
        ([0.5, 0.95, 0.95, 0.95, 0.95, 0.7], 0.8, [0, 1, 4, 5]),
    ],
)
@pytest.mark.parametrize("threshold", [0.0, 0.9])
def test_slots_committed_at_low_confidence_are_redone_with_their_neighbours(
    peaks: list[float], least: float, again: list[int], threshold: float
) -> None:
    """Whether committed in the first pass or in one of their own; then one slot a pass."""
    policy = RevisedParallel(threshold, "redo", least=least)
    found = open_after(policy, ReferenceDenoiser(apart(peaks)))
    drafts = 1 + sum(peak < threshold for peak in peaks)
    assert found[drafts - 1] == again
    assert [len(slots) for slots in found[drafts - 1 :]] == list(range(len(again), -1, -1))


@pytest.mark.parametrize("least", [0.0, 0.4])
def test_a_pass_does_not_edit_what_it_drew(least: float) -> None:
    """Draws are not all the likeliest tokens, and stay until a pass has seen them."""
    model, options = ReferenceDenoiser(apart([0.5] * LENGTH)), {"rows": 8, "noise": 9}
    policy = RevisedParallel(0.0, "edit", least=least, budget=0)
    edited = canvases(policy, model, LENGTH, **options)
    plain = canvases(mmaccel.ConfidentParallel(0.0), model, LENGTH, **options)
    assert len(edited) == 1 and torch.equal(edited[0], plain[0])
    assert 0.2 < float((plain[0] != 0).float().mean()) < 0.8
