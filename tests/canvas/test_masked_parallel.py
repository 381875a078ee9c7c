"""MaskGIT and Halton: how many slots a pass takes, which, and how much of that is noise."""

from __future__ import annotations

from dataclasses import replace
from math import pi, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser
from mmaccel.samplers.canvas.masked_parallel import MaskedParallel, NoisyRank
from mmaccel.samplers.canvas.selector import SelectorState
from tests.fixtures.canvas import canvases, independent, open_run, predictions_of

LENGTH, ROWS, MANY = 8, 24, 4096
MEAN, SPREAD = 0.577216, pi / sqrt(6)  # of standard Gumbel noise


def rank_of(done: int, steps: int | None, choice: float = 4.5, sees: bool = False) -> Tensor:
    """What is added to the logarithm of each of many slots' probabilities."""
    state = SelectorState.of(open_run())
    state.block_passes = torch.tensor([done])
    peaks = torch.linspace(0.5, 0.99, MANY)
    seen = replace(predictions_of([peaks.tolist()]), chance=peaks.flip(0)[None])
    own = seen.chance if sees else seen.peak
    assert own is not None
    return NoisyRank(state, choice, steps, sees).rank(seen) - own.log()


@pytest.mark.parametrize("sees", [False, True])
@pytest.mark.parametrize("choice", [4.5, 1.0])
@pytest.mark.parametrize("done, steps, left", [(0, 4, 0.75), (2, 4, 0.25), (5, 8, 0.25)])
def test_choice_noise_is_gumbel_and_fades(
    done: int, steps: int, left: float, choice: float, sees: bool
) -> None:
    added = rank_of(done, steps, choice, sees)
    assert float(added.mean()) == pytest.approx(choice * left * MEAN, abs=0.08 * choice * left)
    assert float(added.std()) == pytest.approx(choice * left * SPREAD, rel=0.06)


def test_the_last_pass_has_no_noise_and_choice_0_never_any() -> None:
    for done, steps, choice in ((3, 4, 4.5), (0, 1, 4.5), (9, 4, 4.5), (0, 4, 0.0)):
        assert float(rank_of(done, steps, choice).abs().max()) < 1e-6


def passes_of(policy: Any, temperature: float = 0.0, rows: int = ROWS) -> Tensor:
    """`[B, L]`, the pass that committed each slot; lower slots have higher confidence."""
    peaks = [0.97 - 0.05 * k for k in range(LENGTH)]
    model = ReferenceDenoiser(independent(*[[peak, 1 - peak] for peak in peaks]))
    found = canvases(policy, model, LENGTH, rows, temperature=temperature, noise=2)
    return (found < 0).sum(0)


@pytest.mark.parametrize("choose", ["first", "last"])
def test_choice_noise_moves_slots_and_choice_0_does_not(choose: str) -> None:
    still = passes_of(MaskedParallel(4, "linear", choose=choose, choice=0.0))
    assert still.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]] * ROWS
    moved = passes_of(MaskedParallel(4, "linear", choose=choose, choice=4.5))
    assert len(moved.unique(dim=0)) > ROWS // 2
    slightly = passes_of(MaskedParallel(4, "linear", choose=choose, choice=0.05))
    off = [float((passes - still).abs().float().mean()) for passes in (moved, slightly)]
    assert off[0] > 4 * off[1] > 0


QUOTAS = {  # of 8 slots in 4 passes: those left open are 8 cos(pi t / 8), 8 arccos(t / 4) 2 / pi
    "cosine": [1, 2, 2, 3],  # 7.4, 5.7, 3.1, 0
    "arccos": [2, 1, 2, 3],  # 6.7, 5.3, 3.7, 0
    "linear": [2, 2, 2, 2],
}


@pytest.mark.parametrize("order", ["confidence", "halton", "left"])
@pytest.mark.parametrize("schedule", [None, *QUOTAS])
def test_every_order_has_its_own_schedule_and_takes_any_other(
    order: str, schedule: str | None
) -> None:
    passes = passes_of(MaskedParallel(4, schedule, order))
    own = schedule or ("arccos" if order == "halton" else "cosine")
    assert all(row.bincount().tolist() == QUOTAS[own] for row in passes)


def test_the_choice_depends_on_draws_with_choose_last_alone() -> None:
    """At temperature 0 both choices use the likeliest token's probability, else not."""
    last, first = (MaskedParallel(4, choose=choose, choice=0.0) for choose in ("last", "first"))
    assert torch.equal(passes_of(last), passes_of(first))
    assert torch.equal(passes_of(first, 1.0), passes_of(first))
    assert not torch.equal(passes_of(last, 1.0), passes_of(first))
