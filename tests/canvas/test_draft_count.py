"""How many canvases a pass computes, driven by made-up costs instead of a clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mmaccel.samplers.canvas.draft_count import CANDIDATES, FixedDrafts, MeasuredDrafts

LENGTH = 256


class Model:
    """Something that measurements are kept for."""

    model = None


def drive(
    counts: MeasuredDrafts,
    cost: Callable[[int], float],
    gain: Callable[[int], float],
    length: int = LENGTH,
    rows: int = 2,
) -> tuple[list[int], float]:
    """Canvases of every pass of a run, and the seconds of all of them."""
    chosen, left, total = [], float(length), 0.0
    while left > 0:
        number = counts.choose(rows)
        gains = [gain(tried) for tried in CANDIDATES if tried <= number]
        counts.observe(number, gains, cost(number))
        chosen.append(number)
        left, total = left - gains[-1], total + cost(number)
    return chosen, total


LOSING = {
    "every draft wrong": (lambda n: float(n), lambda n: 1.0),
    "every draft right, no arithmetic to spare": (lambda n: 1.02 * n, lambda n: float(n)),
    "as on two processor cores": (lambda n: 0.97 * n, lambda n: n**0.87),
    "free up to 2, dear from there": (lambda n: 1.0 if n < 3 else 0.8 * n, lambda n: 1 + 0.01 * n),
}


@pytest.mark.parametrize("name", LOSING)
def test_drafts_that_do_not_pay_lose_three_hundredths_at_most(name: str) -> None:
    cost, gain = LOSING[name]
    model, total = Model(), 0.0
    for run in range(1, 6):
        chosen, seconds = drive(MeasuredDrafts(model, "", LENGTH), cost, gain)
        total += seconds
        assert total <= 1.03 * LENGTH * cost(1) * run
        assert chosen.count(1) > 0.9 * len(chosen) or cost(2) == 1.0
    assert chosen[-1] == 1 or cost(chosen[-1]) / gain(chosen[-1]) < cost(1)


def test_a_pass_that_is_dearer_than_its_canvases_is_not_tried_again() -> None:
    """What a pass takes cannot be known before the first one."""
    model, tried = Model(), 0
    for _ in range(6):
        counts = MeasuredDrafts(model, "", LENGTH)
        chosen, _ = drive(counts, lambda n: 1.0 if n == 1 else 40.0, lambda n: float(n))
        tried += chosen.count(2)
    assert tried == 1 and set(chosen) == {1}


@pytest.mark.parametrize("length", [64, LENGTH])
def test_idle_arithmetic_is_used(length: int) -> None:
    counts = MeasuredDrafts(Model(), "", length)
    chosen, seconds = drive(counts, lambda n: 1 + 0.02 * n, lambda n: n**0.85, length)
    assert chosen[:7] == [1, 1, 2, 2, 4, 4, 8] and set(chosen[7:]) == {8}
    assert counts.describe().startswith("8 canvases a pass: they take 1.14 times as long as 1")


def test_the_number_in_between_that_pays_most() -> None:
    cost = {1: 1.0, 2: 1.1, 4: 1.4, 8: 5.0}
    counts = MeasuredDrafts(Model(), "", 1024)
    chosen, _ = drive(counts, cost.__getitem__, lambda n: n**0.8, 1024)
    assert chosen.count(4) > 0.9 * len(chosen) and chosen[-1] == 4


def test_measurements_outlive_a_run_and_belong_to_a_model_and_its_rows() -> None:
    model, options = Model(), (lambda n: 1 + 0.02 * n, lambda n: n**0.85)
    drive(MeasuredDrafts(model, "", LENGTH), *options)
    assert set(drive(MeasuredDrafts(model, "", LENGTH), *options)[0]) == {8}
    for counts, rows in (
        (MeasuredDrafts(Model(), "", LENGTH), 2),
        (MeasuredDrafts(model, "others", LENGTH), 2),
        (MeasuredDrafts(model, "", LENGTH), 4),
    ):
        assert drive(counts, *options, rows=rows)[0][:3] == [1, 1, 2]


def test_passes_of_fewer_rows_take_the_best_and_are_not_measured() -> None:
    model = Model()
    counts = MeasuredDrafts(model, "", LENGTH)
    drive(counts, lambda n: 1 + 0.02 * n, lambda n: n**0.85, rows=6)
    before = counts.costs.numbers[8].row_passes
    assert counts.choose(4) == 8
    counts.observe(8, [1.0, 1.0, 1.0, 1.0], 1000.0)
    assert counts.costs.numbers[8].row_passes == before and counts.choose(6) == 8


def test_numbers_are_timed_again_when_the_step_time_changes() -> None:
    model = Model()
    drive(MeasuredDrafts(model, "", LENGTH), lambda n: float(n), lambda n: n**0.9)
    chosen, _ = drive(MeasuredDrafts(model, "", LENGTH), lambda n: 0.2, lambda n: n**0.9)
    assert chosen[0] == 1 and chosen[-1] == 8


def test_few_slots_are_not_worth_a_trial() -> None:
    counts = MeasuredDrafts(Model(), "", 12)
    assert set(drive(counts, lambda n: 0.1, lambda n: float(n), 12)[0]) == {1}
    assert counts.describe() == "1 canvas a pass, too few slots for a trial of 2"


def test_a_fixed_number_stays() -> None:
    counts = FixedDrafts(5)
    counts.observe(5, [1.0], 1.0)
    assert counts.choose(3) == 5 and counts.describe() == "" and not counts.is_measured
