"""MaskGIT and Halton: how many slots a pass takes, which, and how much of that is noise."""

from __future__ import annotations

from dataclasses import replace
from math import pi, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel.contracts import Prompt
from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser
from mmaccel.samplers.canvas.masked_parallel import MaskedParallel, NoisyRank
from mmaccel.samplers.canvas.orders import halton_ranks
from mmaccel.samplers.canvas.selector import SelectorState
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from tests.canvas.test_selectors import run_of, seen_of

LENGTH, ROWS, MANY = 8, 24, 4096
MEAN, SPREAD = 0.577216, pi / sqrt(6)  # of standard Gumbel noise


def rank_of(done: int, steps: int | None, choice: float = 4.5, sees: bool = False) -> Tensor:
    """What is added to the logarithm of each of many slots' probabilities."""
    memory = SelectorState.of(run_of())
    memory.passes = torch.tensor([done])
    peaks = torch.linspace(0.5, 0.99, MANY)
    seen = replace(seen_of([peaks.tolist()]), chance=peaks.flip(0)[None])
    own = seen.chance if sees else seen.peak
    assert own is not None
    return NoisyRank(memory, choice, steps, sees).rank(seen) - own.log()


@pytest.mark.parametrize("sees", [False, True])
@pytest.mark.parametrize("choice", [4.5, 1.0])
@pytest.mark.parametrize(
    "done, steps, left", [(0, 4, 0.75), (1, 4, 0.5), (2, 4, 0.25), (5, 8, 0.25)]
)
def test_choice_noise_is_gumbel_and_fades(
    done: int, steps: int, left: float, choice: float, sees: bool
) -> None:
    added = rank_of(done, steps, choice, sees)
    assert float(added.mean()) == pytest.approx(choice * left * MEAN, abs=0.08 * choice * left)
    assert float(added.std()) == pytest.approx(choice * left * SPREAD, rel=0.06)


@pytest.mark.parametrize(
    "done, steps, choice", [(3, 4, 4.5), (0, 1, 4.5), (9, 4, 4.5), (0, 4, 0.0)]
)
def test_the_last_pass_has_no_noise_and_choice_0_never_any(
    done: int, steps: int, choice: float
) -> None:
    assert float(rank_of(done, steps, choice).abs().max()) < 1e-6


def test_noise_stays_where_there_is_no_last_pass() -> None:
    for done in (0, 7):
        assert float(rank_of(done, None, 2.0).std()) == pytest.approx(2.0 * SPREAD, rel=0.06)


def test_every_pass_has_noise_of_its_own() -> None:
    memory, ones = SelectorState.of(run_of()), torch.ones(1, dtype=torch.int64)
    seen, found = seen_of([[0.5] * MANY]), []
    for _ in range(3):
        found.append(NoisyRank(memory, 1.0, None, False).rank(seen)[0])
        memory.run.ledger.charge(ones, torch.zeros(1), ones > 0)
    assert float(torch.corrcoef(torch.stack(found)).triu(1).abs().max()) < 0.08


def apart(peaks: list[float]) -> Tensor:
    """A joint law of slots that know nothing of each other; token 0 has `peaks`."""
    joint = torch.ones((), dtype=torch.float64)
    for peak in peaks:
        joint = joint[..., None] * torch.tensor([peak, 1 - peak], dtype=torch.float64)
    return joint


def turns_of(policy: Any, temperature: float = 0.0, rows: int = ROWS) -> Tensor:
    """`[B, L]`, the pass that committed each slot; earlier slots are surer."""
    ones, found = torch.ones(rows, dtype=torch.int64), []
    options: dict[str, Any] = {"params": SamplingParams(temperature=temperature)}
    options["noise"] = Noise.from_seed(2, rows)
    model = ReferenceDenoiser(apart([0.97 - 0.05 * k for k in range(LENGTH)]))
    prompt = Prompt(ones[:, None], ones)
    note = lambda progress: found.append(progress.is_committed.clone())  # noqa: E731
    policy.sample(model, prompt, LENGTH, on_step=note, **options)
    return (~torch.stack(found)).sum(0)


@pytest.mark.parametrize("choose", ["first", "last"])
def test_choice_noise_moves_slots_and_choice_0_does_not(choose: str) -> None:
    still = turns_of(MaskedParallel(4, "linear", choose=choose, choice=0.0))
    assert still.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]] * ROWS
    moved = turns_of(MaskedParallel(4, "linear", choose=choose, choice=4.5))
    assert len(moved.unique(dim=0)) > ROWS // 2
    slightly = turns_of(MaskedParallel(4, "linear", choose=choose, choice=0.05))
    off = [float((turns - still).abs().float().mean()) for turns in (moved, slightly)]
    assert off[0] > 4 * off[1] > 0


def test_noise_of_the_choice_is_weaker_in_later_passes() -> None:
    """How often the surest of the open slots is passed over, which is a whim of the noise."""
    turns = turns_of(MaskedParallel(LENGTH, "linear", choose="first", choice=0.5), rows=200)
    missed = []
    for turn in range(LENGTH - 1):
        surest = torch.where(turns >= turn, torch.arange(LENGTH), LENGTH).amin(1, keepdim=True)
        missed.append(float((turns.gather(1, surest)[:, 0] != turn).float().mean()))
    assert missed[0] > 0.5 and missed[-1] < 0.1
    assert sum(missed[:3]) > 1.5 * sum(missed[-3:])


QUOTAS = {  # of 8 slots in 4 passes: those left open are 8 cos(pi t / 8), 8 arccos(t / 4) 2 / pi
    "cosine": [1, 2, 2, 3],  # 7.4, 5.7, 3.1, 0
    "arccos": [2, 1, 2, 3],  # 6.7, 5.3, 3.7, 0
    "linear": [2, 2, 2, 2],
}


@pytest.mark.parametrize("order", ["confidence", "halton", "random", "left"])
@pytest.mark.parametrize("schedule", [None, "cosine", "arccos", "linear"])
def test_every_order_has_its_own_schedule_and_takes_any_other(
    order: str, schedule: str | None
) -> None:
    turns = turns_of(MaskedParallel(4, schedule, order))
    own = schedule or ("arccos" if order == "halton" else "cosine")
    assert all(row.bincount().tolist() == QUOTAS[own] for row in turns)


def test_halton_takes_slots_in_its_order_whatever_the_noise() -> None:
    place = halton_ranks(LENGTH, 0).long()
    pass_of = torch.repeat_interleave(torch.arange(4), torch.tensor(QUOTAS["arccos"]))
    for choice, temperature in ((0.0, 0.0), (4.5, 1.0)):
        turns = turns_of(MaskedParallel(4, order="halton", choice=choice), temperature)
        assert turns.tolist() == [pass_of[place].tolist()] * ROWS


def test_what_is_drawn_has_a_say_only_where_it_is_asked() -> None:
    """At temperature 0 both choices see the likeliest token's probability, else not."""
    last, first = (MaskedParallel(4, choose=choose, choice=0.0) for choose in ("last", "first"))
    assert torch.equal(turns_of(last), turns_of(first))
    assert torch.equal(turns_of(first, 1.0), turns_of(first))
    assert not torch.equal(turns_of(last, 1.0), turns_of(first))
