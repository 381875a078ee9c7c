"""The width of frames that a policy with `window="adaptive"` settles on."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import mmaccel
from mmaccel.samplers.tuner import Tuner
from mmaccel.samplers.window import window_size
from mmaccel.samplers.window.window_size import SHORT, RunWidth, make_tuner
from tests.depth.models import make_csm

LENGTH = 15
ByWidth = Callable[[int], float]


def speak(
    monkeypatch: pytest.MonkeyPatch, tuner: Tuner, cost: ByWidth, gain: ByWidth, frames: int,
    end: int = LENGTH,
) -> tuple[list[int], float]:  # fmt: skip
    """Widths of frames, and their seconds: a pass of n entries takes `cost(n)`, and gives what a
    window of this width gives, up to slot `end`.
    """
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(window_size, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    widths = []
    for _ in range(frames):
        chooser = RunWidth(tuner, 1, LENGTH)
        widths.append(chooser.width)
        made = 0.0
        width = chooser.begin(LENGTH)
        while width:
            clock.now += cost(width)
            made = min(made + min(gain(chooser.width), width), LENGTH)
            chooser.end(1, int(made), is_usual=True)
            width = chooser.begin(0 if made >= end else LENGTH - int(made))
    return widths, clock.now


def make() -> Tuner:
    return make_tuner((*(each for each in SHORT if each < LENGTH), LENGTH))


def test_frames_settle_on_the_width_that_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: dict[int, tuple[ByWidth, ByWidth]] = {
        1: (lambda n: 1 + 0.5 * (n - 1), lambda w: min(w, 2)),  # wide passes cost too much
        4: (lambda n: 1 + 0.1 * (n - 1), lambda w: min(w, 3)),
        15: (lambda n: 1 + 0.01 * n, lambda w: min(w, 5) if w == LENGTH else min(w, 2)),
    }
    for best, (cost, gain) in cases.items():
        widths, _ = speak(monkeypatch, make(), cost, gain, 60)
        assert set(widths[-20:]) == {best}, (best, widths)


def test_rows_that_end_early_gain_what_they_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that makes one token a pass is not taken because its runs are short."""
    widths, _ = speak(monkeypatch, make(), lambda n: 1 + 0.05 * (n - 1), lambda w: 1.0, 60, end=3)
    assert set(widths[-20:]) == {1}, widths


def test_what_is_tried_costs_little_where_no_window_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    _, seconds = speak(monkeypatch, make(), float, lambda w: 1, 60)
    _, plain = speak(monkeypatch, make_tuner((1,)), float, lambda w: 1, 60)
    assert seconds < 1.25 * plain


def test_calls_go_on_with_the_widths_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    choose = Tuner.choose

    def watch(self: Tuner, *given: Any, **options: Any) -> int:
        widths.append(choose(self, *given, **options))
        return widths[-1]

    monkeypatch.setattr(Tuner, "choose", watch)
    speech = make_csm()
    for _ in range(2):
        with mmaccel.attach(speech.model, mmaccel.Jacobi(window="adaptive"), seed=1):
            speech.call(True)
    assert widths[:3] == [1, 1, 1] and widths[3] > 1
    assert widths[len(widths) // 2] > 1 and max(widths) <= speech.depth
