"""Coarse drafts row by row on the host: what the form for all rows at once makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmaccel import GroupedSpeculative, Jacobi, SpeculativeJacobi
from mmaccel.kernels import dispatch
from mmaccel.kernels.coarse_rounds_numpy import Rounds, RowDrafts, RowWindow
from mmaccel.policies import Policy
from mmaccel.results import Generation
from mmaccel.samplers.drafting.coarse_model import FOLDER
from tests.exactness.bitwise_runs import GRID, OPTIONS, run
from tests.exactness.planted_coarse_bugs import record_uncorrected_distribution
from tests.fixtures.coarse import StateLanguage, strong_coarse

Patch = pytest.MonkeyPatch
POLICIES: dict[str, Callable[[Any], Policy]] = {
    "jacobi": lambda source: Jacobi(7, source),
    "mc-sjd": lambda source: SpeculativeJacobi(6, "maximal", source),
    "sjd gumbel": lambda source: SpeculativeJacobi(6, "gumbel", source),
    "gsd": lambda source: GroupedSpeculative(6, 2, drafts=source),
}


@pytest.fixture
def source_of(tmp_path: Path) -> Callable[[bool], Any]:
    """A strong C that corrects three candidates of a text or of a grid."""

    def make(has_grid: bool) -> Any:
        grid: dict[str, Any] = {"columns": GRID.columns, "frame": GRID.frame, "n_slots": 9}
        grid["neighbours"] = ((0, 0, -1), (0, 1, 0), (0, 1, 1))
        options = grid if has_grid else {}
        source = strong_coarse(torch.eye(5), tmp_path, candidates=3, **options)
        weights = load_file(tmp_path / FOLDER.weights)
        for name in ("slots.weight", "distances.weight", "gates.weight"):  # as strong as the rest
            weights[name] = 50 * weights[name]
        save_file(weights, tmp_path / FOLDER.weights)
        return source

    return make


def decode(policy: Policy, *given: Any, **options: Any) -> Generation:
    return run(policy, *given, model=StateLanguage(5, depth=6), **options)


def assert_like(made: Generation, wanted: Generation) -> None:
    """Drafts, by those accepted, and the recorded distributions, by the tokens of `mc-sjd`."""
    assert made.tokens.equal(wanted.tokens) and made.passes.equal(wanted.passes)
    assert made.stats.accepted == wanted.stats.accepted
    variation = wanted.stats.total_variation
    assert made.stats.total_variation == pytest.approx(variation, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("name", "options"), [*zip(POLICIES, cycle(OPTIONS.values()))], ids=str)
@pytest.mark.parametrize(("rounds", "has_grid"), [(None, True), (2, False)])
def test_a_run_is_the_same(
    name: str,
    options: dict[str, Any],
    rounds: int | None,
    has_grid: bool,
    source_of: Any,
    monkeypatch: Patch,
) -> None:
    policy = POLICIES[name](replace(source_of(has_grid), rounds=rounds))
    redraft, drafted = Rounds.redraft, []

    def count(*given: Any, **named: Any) -> RowDrafts:
        drafted.append(redraft(*given, **named))
        return drafted[-1]

    monkeypatch.setattr(Rounds, "redraft", count)
    settings: list[dict[str, Any]] = [{}, {"stop": [2]}, {"rows": [1]}]
    given = [{"grid": GRID if has_grid else None, **others} for others in settings]
    made = [decode(policy, options, **others) for others in given]
    assert sum(len(each.at) for each in drafted) > 100
    monkeypatch.setenv(dispatch.VARIABLE, "torch")
    del drafted[:]
    for one, others in zip(made, given, strict=True):
        assert_like(one, decode(policy, options, **others))
    assert not drafted


def test_learned_drafts_are_the_same(monkeypatch: Patch) -> None:
    made = decode(Jacobi(7, "online"), {}, grid=None, length=60)
    monkeypatch.setenv(dispatch.VARIABLE, "torch")
    assert_like(made, decode(Jacobi(7, "online"), {}, grid=None, length=60))
    assert (
        made.stats.passes != decode(Jacobi(7, "neighbour"), {}, grid=None, length=60).stats.passes
    )


def take_the_slot_before(patch: Patch) -> None:
    """Stale scores, states and neighbours are those of the slot before."""
    _alter(patch, lambda row: row._replace(moved=max(row.moved - 1, 0)))


def see_the_new_slots(patch: Patch) -> None:
    """The last slot that a pass has seen counts as new."""
    _alter(patch, lambda row: row._replace(width=max(row.width - 1, row.moved)))


def take_the_slot_behind(patch: Patch) -> None:
    """C is told the number of the next slot."""
    _alter(patch, lambda row: row._replace(slot=row.slot + 1))


def leave_noise_out(patch: Patch) -> None:
    _alter(patch, lambda row: row._replace(noise=np.zeros_like(row.noise)))


def draft_one_less(patch: Patch) -> None:
    _alter(patch, lambda row: row._replace(neighbours=row.neighbours[:-1]))


def _alter(patch: Patch, change: Callable[[RowWindow], RowWindow]) -> None:
    redraft = Rounds.redraft

    def wrong(self: Rounds, windows: list[RowWindow], *given: Any, **named: Any) -> RowDrafts:
        return redraft(self, [change(window) for window in windows], *given, **named)

    patch.setattr(Rounds, "redraft", wrong)


BUGS = (
    take_the_slot_before, see_the_new_slots, take_the_slot_behind, leave_noise_out, draft_one_less,
    record_uncorrected_distribution,
)  # fmt: skip


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_planted_bug_is_seen(
    plant: Callable[[Patch], None], source_of: Any, monkeypatch: Patch
) -> None:
    policy = POLICIES["mc-sjd"](source_of(True))
    with monkeypatch.context() as patch:
        patch.setenv(dispatch.VARIABLE, "torch")
        wanted = decode(policy, {})
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        assert_like(decode(policy, {}), wanted)
