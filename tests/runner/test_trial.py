"""Trials: of two ways that give the same numbers the faster one runs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import CausalLMWindow
from mmaccel.contracts import Pass
from mmaccel.pipelines.hosts.runner import fused_decoder
from mmaccel.pipelines.hosts.runner.fused_decoder import FusedDecoder
from mmaccel.pipelines.hosts.runner.trial import find_gain
from mmaccel.samplers import tuner
from mmaccel.samplers.compare_logits import Tolerance, compare_logits
from tests.fixtures.fused_lms import build_decoder

NUMBERS = torch.arange(8.0).view(2, 4)


@pytest.mark.parametrize(("factor", "gain"), [(1.0, 2.0), (1.1, 0.0)])
def test_a_gain_is_that_of_late_turns_and_of_the_same_numbers(
    factor: float, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first case compiles; each way begins in half of the others."""
    now, order = [0.0], []
    monkeypatch.setattr(tuner.time, "perf_counter", lambda: now[0])

    def take(name: str, seconds: float, numbers: Tensor) -> Tensor:
        now[0] += seconds if len(order) >= 2 else 100.0
        order.append(name)
        return numbers

    def first() -> Tensor:
        return take("first", 3.0, NUMBERS)

    def second() -> Tensor:
        return take("second", 1.5, factor * NUMBERS)

    assert find_gain([(first, second)] * 4, Tolerance(mean=1e-3)) == gain
    turns = ["first", "second", "second", "first"]
    assert order == (turns * 2 if gain else turns[:2])


def run_passes(window: CausalLMWindow) -> list[Tensor]:
    """Logits of two rows in passes of 9, 4, 1 and 40 tokens: 18, 8, 2 and 80 products each."""
    ids = torch.randint(40, (2, 60), generator=torch.Generator().manual_seed(1))
    window.reserve(2, 60)
    found = []
    for start, width in ((0, 9), (9, 4), (13, 1), (14, 40)):
        at = torch.full((2,), start)
        found.append(window.forward(Pass(ids[:, start : start + width], at)))
    return found


def test_few_rows_take_the_products_that_a_trial_found_faster(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One trial a tile of the kernel, of eager passes and of captured ones; one that fails, too."""
    expected = run_passes(CausalLMWindow(build_decoder("llama"), fused=True))
    monkeypatch.setattr(fused_decoder.dispatch, "uses_triton", lambda kind: True)
    gains: Iterator[Any] = iter([1.1, 1.0, RuntimeError("no memory"), 2.0])
    captured: list[Any] = []
    by_rows: list[int] = []

    def measure(cases: Any, tolerance: Tolerance) -> float:
        first, second = cases[0]
        assert compare_logits(first(), second()).within(tolerance)
        by_rows.clear()
        gain = next(gains)
        if isinstance(gain, Exception):
            raise gain
        return gain

    own = FusedDecoder._run_by_rows

    def run(self: Any, hidden: Tensor, *rest: Any) -> Tensor:
        by_rows.append(hidden.shape[0] * hidden.shape[1])
        return own(self, hidden, *rest)

    monkeypatch.setattr(fused_decoder, "find_gain", measure)
    monkeypatch.setattr(fused_decoder, "capture", lambda way, _: (captured.append(way), way)[1])
    monkeypatch.setattr(FusedDecoder, "_run_by_rows", run)
    stream = SimpleNamespace(captures=True)  # inside a capture nothing can be tried
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: stream.captures)
    window = CausalLMWindow(build_decoder("llama"), fused=True)
    run_passes(window)
    assert not by_rows
    stream.captures = False
    for is_static, taken in ((False, [18]), (True, [8, 2])):
        runner: Any = SimpleNamespace(is_static=is_static)
        window.setup.runner = runner
        run_passes(window)
        assert len(captured) == 4 * is_static
        by_rows.clear()
        for own_logits, received in zip(expected, run_passes(window)):
            assert compare_logits(own_logits, received).largest < 1e-4
        assert by_rows == taken
    assert next(gains, None) is None
    assert caplog.text.count("trial ends in a RuntimeError (no memory)") == 1
