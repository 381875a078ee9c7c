"""The adaptive width against made-up machines: cost and gain per width are given."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mmaccel import Jacobi, OptionError, SpeculativeJacobi
from mmaccel.samplers.width import CANDIDATES, AdaptiveWidth, FixedWidth


def drive(
    chooser: AdaptiveWidth, cost: Callable[[int], float], gain: Callable[[int], float], passes: int
) -> list[int]:
    """Run passes; a width's first pass costs ten times as much, as allocations do."""
    widths: list[int] = []
    for _ in range(passes):
        width = chooser.choose(10_000)
        slow = 10 if width not in widths else 1
        chooser.observe(width, round(gain(width) * 16), slow * cost(width))
        widths.append(width)
    return widths


MACHINES = {  # seconds of a pass, tokens of a pass, best width
    "free arithmetic": (lambda w: 1.0, lambda w: w**0.5, 64),
    "dear arithmetic": (lambda w: w, lambda w: w**0.5, 1),
    "measured on two cores": (lambda w: 3.5 + 0.1 * w, lambda w: 9 * w / (w + 25), 32),
    "flat gain": (lambda w: 1 + 0.02 * w, lambda w: min(w, 4), 8),
    "medium": (lambda w: 4 + 0.25 * w, lambda w: min(w, 16) ** 0.7, 16),
}


@pytest.mark.parametrize("cost, gain, best", MACHINES.values(), ids=MACHINES)
def test_finds_the_best_width(
    cost: Callable[[int], float], gain: Callable[[int], float], best: int
) -> None:
    assert best == max(CANDIDATES, key=lambda w: gain(w) / cost(w))
    widths = drive(AdaptiveWidth(), cost, gain, 300)
    assert widths[20:].count(best) > 0.9 * 280
    assert widths[20:44].count(best) >= 22  # two passes to try a neighbour again


@pytest.mark.parametrize("cost, gain, best", MACHINES.values(), ids=MACHINES)
def test_loses_no_more_than_its_trials(
    cost: Callable[[int], float], gain: Callable[[int], float], best: int
) -> None:
    """Against width 1: at least as many tokens per second, the first 20 passes apart."""
    widths = drive(AdaptiveWidth(), cost, gain, 400)[20:]
    seconds, tokens = sum(map(cost, widths)), sum(map(gain, widths))
    assert tokens / seconds > 0.8 * gain(1) / cost(1)
    if best > 1:
        assert tokens / seconds > gain(1) / cost(1)


def test_follows_a_machine_that_changes() -> None:
    """Arithmetic becomes dear, then free again; the second is only seen by trying neighbours."""
    chooser = AdaptiveWidth()
    drive(chooser, lambda w: 1.0, lambda w: w**0.5, 60)
    widths = drive(chooser, lambda w: float(w), lambda w: w**0.5, 400)
    assert widths[-24:].count(1) > 20
    widths = drive(chooser, lambda w: 1.0, lambda w: w**0.5, 400)
    assert widths[-24:].count(64) > 20


def test_the_end_of_a_row_is_not_learnt() -> None:
    """A width cut short by the end is no candidate and changes nothing."""
    chooser, twin = AdaptiveWidth(), AdaptiveWidth()
    for c in (chooser, twin):
        drive(c, lambda w: 1.0, lambda w: w**0.5, 30)
    assert chooser.choose(5) == 5
    for _ in range(3):
        chooser.observe(5, 1, 1e-9)
    twin.choose(10_000)
    assert all(chooser.rate(w) == twin.rate(w) for w in (5, *CANDIDATES))
    assert chooser.rate(5) is None


def test_rate_needs_two_passes() -> None:
    chooser = AdaptiveWidth()
    assert chooser.rate(16) is None
    chooser.observe(16, 10, 100.0)
    assert chooser.rate(16) is None
    chooser.observe(16, 20, 5.0)
    assert chooser.rate(16) == pytest.approx(15 / 5)  # the slow first pass is forgotten
    chooser.observe(16, 20, 15.0)
    assert chooser.rate(16) == pytest.approx((15 + 0.3 * 5) / (5 + 0.3 * 10))


@pytest.mark.parametrize("remaining, width", [(100, 16), (16, 16), (7, 7), (1, 1)])
def test_never_wider_than_what_is_wanted(remaining: int, width: int) -> None:
    assert FixedWidth(16).choose(remaining) == width
    assert AdaptiveWidth().choose(remaining) == min(CANDIDATES[len(CANDIDATES) // 2], remaining)


@pytest.mark.parametrize("window", [0, -1, 2.0, True, "wide", None], ids=repr)
def test_bad_windows(window: object) -> None:
    for policy in (Jacobi, SpeculativeJacobi):
        with pytest.raises(OptionError, match="window: expected .*, received .*; "):
            policy(window)  # type: ignore[arg-type]


def test_adaptive_is_for_jacobi_alone() -> None:
    assert Jacobi("adaptive").window == "adaptive"
    with pytest.raises(OptionError, match="window"):
        SpeculativeJacobi("adaptive")  # type: ignore[arg-type]
