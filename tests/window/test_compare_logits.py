"""compare_logits: rounding agrees, a leak does not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mmaccel.samplers.compare_logits import Tolerance, compare_logits

LOGITS = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
NAN, INF = float("nan"), float("inf")


def filled(value: float) -> Tensor:
    """The logits with one id at that value."""
    made = LOGITS.clone()
    made[..., 7] = value
    return made


def test_differences_are_counted_in_standard_deviations() -> None:
    moved = LOGITS.clone()
    moved[1, 3, 2] += 0.5
    found, spread = compare_logits(LOGITS * 10, moved * 10), float(LOGITS.std(correction=0))
    assert found.largest == pytest.approx(0.5 / spread)
    assert found.mean == pytest.approx(0.5 / spread / LOGITS.numel())
    assert found.is_telling
    said = "1 standard deviations off in the mean, 1 at most"
    assert str(compare_logits(LOGITS, LOGITS + spread)) == said
    assert compare_logits(LOGITS, LOGITS).largest == 0


@pytest.mark.parametrize(
    "tolerance, agrees, differs",
    [
        (Tolerance.strict(torch.float64), 1e-12, 1e-7),
        (Tolerance.strict(torch.float32), 1e-6, 1e-3),
        (Tolerance.strict(torch.bfloat16), 1e-3, 1e-1),
        (Tolerance.of(torch.float32), 8e-4, 2e-3),
        (Tolerance.of(torch.float16), 0.04, 0.06),
        (Tolerance.of(torch.bfloat16), 0.06, 0.09),
    ],
)
def test_a_tolerance_rejects_what_is_not_rounding(
    tolerance: Tolerance, agrees: float, differs: float
) -> None:
    assert compare_logits(LOGITS, LOGITS + agrees).within(tolerance)
    assert not compare_logits(LOGITS, LOGITS + differs).within(tolerance)


def test_only_positions_that_are_asked_for_are_compared() -> None:
    where = torch.ones(2, 4, dtype=torch.bool)
    where[0, 2] = False
    moved = LOGITS.clone()
    moved[0, 2] = NAN
    assert compare_logits(LOGITS, moved, where).largest == 0
    assert compare_logits(moved, LOGITS, where).is_telling
    assert compare_logits(LOGITS, moved).largest == INF


@pytest.mark.parametrize("fill", [-INF, -1e9, -1e4])
def test_masked_ids_not_their_values_are_compared(fill: float) -> None:
    assert compare_logits(filled(fill), filled(fill * 1.1)).largest == 0
    assert compare_logits(filled(fill), filled(-INF)).largest == 0
    for pair in ((filled(fill), LOGITS), (LOGITS, filled(fill))):
        assert compare_logits(*pair).mean == INF
    leak = compare_logits(filled(fill), filled(fill) + 0.1)
    assert 0.05 < leak.mean < 0.2 and math.isclose(leak.mean, leak.largest)


@pytest.mark.parametrize("value", [NAN, INF])
def test_nan_and_infinity_never_agree(value: float) -> None:
    assert compare_logits(LOGITS, filled(value)).mean == INF


def test_logits_that_prove_nothing_are_reported() -> None:
    assert not compare_logits(filled(NAN), LOGITS).is_telling
    alike = torch.zeros_like(LOGITS)
    assert not compare_logits(alike, alike).is_telling and compare_logits(alike, alike).mean == 0
    assert compare_logits(alike, LOGITS).largest == INF
