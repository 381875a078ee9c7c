"""Accuracy under parallelism against areas computed by hand."""

from __future__ import annotations

import math

import pytest

from mmaccel.evaluation.parallelism import accuracy_under_parallelism, summarize


def test_no_loss_of_accuracy_is_the_plain_area() -> None:
    points = [(1.0, 80.0), (2.0, 80.0), (5.0, 80.0)]
    assert accuracy_under_parallelism(points, 80.0) == pytest.approx(5 * 80)


def test_one_point_is_a_rectangle() -> None:
    assert accuracy_under_parallelism([(3.0, 70.0)], 90.0) == pytest.approx(210)


def test_a_loss_is_weighed_and_what_loses_too_much_is_left_out() -> None:
    weigh = 78 * math.exp(-3 * (1 - 78 / 80))
    wanted = 1 * 80 + (3 - 1) * (80 + weigh) / 2
    points = [(9.0, 74.9), (3.0, 78.0), (1.0, 80.0)]  # in any order; 74.9 is below 80 - 5
    assert accuracy_under_parallelism(points, 80.0) == pytest.approx(wanted)
    at_the_limit = accuracy_under_parallelism([(1.0, 80.0), (9.0, 75.0)], 80.0)
    assert at_the_limit == pytest.approx(80 + 4 * (80 + 75 * math.exp(-3 * (1 - 75 / 80))))


def test_rows_of_one_policy_are_its_points() -> None:
    def row(model: str, settings: str, speed: float, **quality: float) -> dict[str, object]:
        return {
            "model": model, "settings": settings, "tokens_per_pass": speed, "quality": quality,
        }  # fmt: skip

    rows = [
        row("text", "One(a=1)", 1.0, right=0.9),
        row("text", "Other()", 2.0, right=0.8),
        row("text", "One(a=2)", 2.0, right=0.9),
        row("images", "One(a=1)", 4.0, whole=0.5),
        row("toys", "One(a=1)", 4.0, worst=0.5),
    ]
    found = {(each["model"], each["policy"]): each["aup"] for each in summarize(rows)}
    assert found == {
        ("text", "One"): pytest.approx(2 * 90),
        ("text", "Other"): pytest.approx(2 * 80),
        ("images", "One"): pytest.approx(4 * 50),
    }
    assert summarize([]) == []
