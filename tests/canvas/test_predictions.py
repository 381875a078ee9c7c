"""SlotPredictions of a pass: thresholds read the model's law, entropies and draws the target law."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.contracts import Prompt
from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser
from mmaccel.samplers.canvas.predictions import SlotPredictions, read_logits
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from tests.fixtures.toy_models import law_by_hand

ROWS, SLOTS, TOKENS = 2, 5, 6  # id 6 is the mask token
OTHERS: list[dict[str, Any]] = [
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 2},
    {"top_p": 0.7},
    {"min_p": 0.3},
    {"temperature": 1.6, "top_k": 4, "top_p": 0.8},
]


class Barred:
    """A layout that bars one token."""

    columns = frame = 0

    def __init__(self, token: int) -> None:
        self.token = token

    def forced(self, slots: Tensor) -> None:
        return None

    def allowed(self, slots: Tensor) -> Tensor:
        return (torch.arange(TOKENS + 1) != self.token).expand(*slots.shape, -1)


def logits_of() -> Tensor:
    """`[B, Q, V + 1]`; the mask token is the likeliest, were it one."""
    rng = torch.Generator().manual_seed(2)
    logits = 1.5 * torch.randn(ROWS, SLOTS, TOKENS + 1, generator=rng, dtype=torch.float64)
    logits[..., TOKENS] = 9.0
    return logits


def read(layout: Any = None, **params: Any) -> SlotPredictions:
    slots = torch.arange(SLOTS).expand(ROWS, -1)
    return read_logits(
        logits_of(),
        1,
        slots,
        slots != 3,
        mask_token=TOKENS,
        params=SamplingParams(**params),
        noise=Noise.from_seed(4, ROWS),
        layout=layout,
    )


def by_hand(row: int, slot: int, barred: int = -1, **params: Any) -> list[float]:
    law = law_by_hand(**params, allowed=[v for v in range(TOKENS) if v != barred])
    return law([logits_of()[row, slot].tolist()], slot)


def entropy(law: list[float]) -> float:
    return -sum(p * math.log(p) for p in law if p > 0)


def where_open(seen: SlotPredictions) -> list[tuple[int, int]]:
    return [(row, slot) for row, slot in seen.is_open.nonzero().tolist()]


@pytest.mark.parametrize("params", [{}, *OTHERS], ids=str)
def test_each_number_is_of_the_law_it_is_said_to_be_of(params: dict[str, Any]) -> None:
    seen = read(**params)
    assert len(where_open(seen)) == ROWS * (SLOTS - 1)
    for row, slot in where_open(seen):
        law, target = by_hand(row, slot), by_hand(row, slot, **params)
        first, second = sorted(law, reverse=True)[:2]
        assert float(seen.peak[row, slot]) == pytest.approx(first, abs=1e-5)
        assert float(seen.gap[row, slot]) == pytest.approx(first - second, abs=1e-5)
        assert float(seen.entropy[row, slot]) == pytest.approx(entropy(target), abs=1e-5)
        assert seen.law[row, slot].softmax(-1).tolist() == pytest.approx(law, abs=1e-5)
        assert seen.drawn is not None and seen.chance is not None
        chance = target[int(seen.drawn[row, slot])]
        assert float(seen.chance[row, slot]) == pytest.approx(chance, abs=1e-5) and chance > 0


def test_the_laws_of_these_filters_can_be_told_apart() -> None:
    for params in OTHERS:
        pairs = [(by_hand(r, s), by_hand(r, s, **params)) for r, s in where_open(read())]
        assert max(abs(entropy(a) - entropy(b)) for a, b in pairs) > 0.1
        assert max(abs(max(a) - max(b)) for a, b in pairs) > 0.05


def test_at_temperature_0_entropy_is_the_models_and_the_likeliest_is_drawn() -> None:
    seen = read(temperature=0.0, top_k=2)
    assert seen.drawn is not None
    for row, slot in where_open(seen):
        law = by_hand(row, slot)
        assert float(seen.entropy[row, slot]) == pytest.approx(entropy(law), abs=1e-5)
        assert int(seen.drawn[row, slot]) == law.index(max(law))


def test_what_a_layout_bars_is_no_part_of_either_law() -> None:
    likeliest = by_hand(0, 0)
    barred = likeliest.index(max(likeliest))
    seen = read(Barred(barred), temperature=2.0)
    law, target = by_hand(0, 0, barred), by_hand(0, 0, barred, temperature=2.0)
    assert float(seen.peak[0, 0]) == pytest.approx(max(law), abs=1e-5)
    assert float(seen.entropy[0, 0]) == pytest.approx(entropy(target), abs=1e-5)


@pytest.mark.parametrize("field", ["peak", "gap", "law"])
def test_thresholds_do_not_move_with_the_filters(field: str) -> None:
    plain = read()
    for params in OTHERS:
        other = read(**params)
        assert torch.equal(
            getattr(other, field)[plain.is_open], getattr(plain, field)[plain.is_open]
        )


POLICIES = [
    mmaccel.ConfidentParallel(0.8),
    mmaccel.ConfidentParallel(rule="frechet"),
    mmaccel.LocalLeap(0.9, 1, 0.7),
    mmaccel.KLStable(0.8, steps=1),
    mmaccel.MaskedParallel(2, choose="first", choice=0.0),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("params", [{"temperature": 3.0}, {"temperature": 0.3}, {"top_k": 1}])
def test_rules_of_confidence_choose_the_same_slots_at_every_temperature(
    policy: Any, params: dict[str, Any]
) -> None:
    """Slots that know nothing of each other: what was drawn changes no law."""
    peaks = torch.tensor([0.95, 0.6, 0.85, 0.75, 0.5, 0.9], dtype=torch.float64)
    joint = torch.ones((), dtype=torch.float64)
    for peak in peaks:
        lone = torch.stack([peak, (1 - peak) * 0.7, (1 - peak) * 0.3])
        joint = joint[..., None] * lone
    found = [chosen(policy, joint, SamplingParams(**given)) for given in ({}, params)]
    assert found[0] == found[1] and len(found[0]) > 1


def chosen(policy: Any, joint: Tensor, params: SamplingParams) -> list[list[int]]:
    """Slots committed at each pass of one row."""
    ones = torch.ones(1, dtype=torch.int64)
    made, before = [], torch.zeros(6, dtype=torch.bool)

    def note(progress: Any) -> None:
        made.append((progress.is_committed[0] & ~before).nonzero()[:, 0].tolist())
        before.copy_(progress.is_committed[0])

    noise = Noise.from_seed(6, 1)
    prompt = Prompt(ones[:, None], ones)
    policy.sample(ReferenceDenoiser(joint), prompt, 6, params=params, noise=noise, on_step=note)
    return made


def test_sealed_evidence_says_nothing_of_what_was_drawn() -> None:
    seen = read()
    sealed = seen.sealed()
    assert sealed.drawn is None is sealed.chance
    assert replace(sealed, drawn=seen.drawn, chance=seen.chance) == seen
