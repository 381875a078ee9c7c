"""Predictions of a pass: thresholds use the model's distribution, draws the target distribution."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel.samplers.canvas.predictions import SlotPredictions, read_logits
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from tests.fixtures.toy_models import distribution_by_hand

ROWS, SLOTS, TOKENS = 2, 5, 6  # id 6 is the mask token
OTHERS: list[dict[str, Any]] = [
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 2},
    {"top_p": 0.7},
    {"min_p": 0.3},
    {"top_n_sigma": 1.0},
    {"top_h": 0.6},
    {"eta_cutoff": 0.25},
    {"entropy_temperature": 3.0},
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
    """`[B, Q, V + 1]`; the mask token has the highest logit."""
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
    model = distribution_by_hand(**params, allowed=[v for v in range(TOKENS) if v != barred])
    return model([logits_of()[row, slot].tolist()], slot)


def entropy(model: list[float]) -> float:
    return -sum(p * math.log(p) for p in model if p > 0)


def where_open(seen: SlotPredictions) -> list[tuple[int, int]]:
    return [(row, slot) for row, slot in seen.is_open.nonzero().tolist()]


@pytest.mark.parametrize("params", [{}, *OTHERS], ids=str)
def test_each_number_is_that_of_its_distribution(params: dict[str, Any]) -> None:
    seen = read(**params)
    assert len(where_open(seen)) == ROWS * (SLOTS - 1)
    for row, slot in where_open(seen):
        model, target = by_hand(row, slot), by_hand(row, slot, **params)
        first, second = sorted(model, reverse=True)[:2]
        assert float(seen.peak[row, slot]) == pytest.approx(first, abs=1e-5)
        assert float(seen.gap[row, slot]) == pytest.approx(first - second, abs=1e-5)
        assert float(seen.entropy[row, slot]) == pytest.approx(entropy(target), abs=1e-5)
        assert seen.logits[row, slot].softmax(-1).tolist() == pytest.approx(model, abs=1e-5)
        assert seen.drawn is not None and seen.chance is not None
        chance = target[int(seen.drawn[row, slot])]
        assert float(seen.chance[row, slot]) == pytest.approx(chance, abs=1e-5) and chance > 0


def test_a_token_barred_by_the_layout_is_impossible_in_both_distributions() -> None:
    likeliest = by_hand(0, 0)
    barred = likeliest.index(max(likeliest))
    seen = read(Barred(barred), temperature=2.0)
    model, target = by_hand(0, 0, barred), by_hand(0, 0, barred, temperature=2.0)
    assert float(seen.peak[0, 0]) == pytest.approx(max(model), abs=1e-5)
    assert float(seen.entropy[0, 0]) == pytest.approx(entropy(target), abs=1e-5)
