"""Rows that join a run: which batch slots there are, and that the run forgets rows that ended.

That a row that joins is the row alone is proved in `tests/matrix`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mmaccel import CausalLMWindow, ContinuousBatching, Noise, SamplingParams
from mmaccel.contracts import FinishedRow, Prompt
from mmaccel.results import Generation
from mmaccel.samplers.scheduling import Scheduler
from tests.exactness import test_continuous_batching as window
from tests.fixtures.arriving import Arriving
from tests.fixtures.graph_replay import Replay
from tests.matrix.test_batching import check_rows


def widened(prompt: Prompt, width: int = 8) -> Prompt:
    """With room for longer prompts."""
    pad = width - prompt.tokens.shape[1]
    return replace(prompt, tokens=torch.nn.functional.pad(prompt.tokens, (0, pad)))


def decode_window(
    name: str, scale: float, n_slots: int, gap: int, model: Any = None
) -> tuple[Generation, list[FinishedRow], Arriving]:
    """The first two rows begin, the others join."""
    given: list[FinishedRow] = []
    arriving = Arriving(window.ALL[2:], lambda rows: window.prompt(rows, scale), gap)
    batching = ContinuousBatching(n_slots, given.append, arriving)
    made = window.policies()[name].sample(
        model or CausalLMWindow(window.tiny("llama")),
        replace(widened(window.prompt([0, 1], scale)), batching=batching),
        window.LENGTH,
        params=SamplingParams(guidance_scale=scale, top_k=20),
        noise=Noise.from_seed([100, 101], 2),
    )
    return made, given, arriving


def test_batch_slots_come_and_go_with_rows() -> None:
    """A pass computes the rows that are there and no others, and prompts without their padding."""
    model = CausalLMWindow(window.build_lm("llama").double())
    seen = window.record_shapes(model)
    made, given, _ = decode_window("plain", 1.0, 9, 2, model)
    check_rows(given, window.alone("plain", 1.0))
    decoded = [n for n, width in seen if width == 1]
    assert {1, 2, 3} < set(decoded) and len(set(decoded)) > 3
    assert decoded != sorted(decoded) and decoded != sorted(decoded, reverse=True)
    assert sum(decoded) == made.stats.row_passes + 1  # a prompt of two tokens joined alone
    prefills = [shape for shape in seen if shape[1] > 1]
    assert prefills[0] == (2, 3)  # prompts of 4 tokens and 1, though 8 have room
    assert made.stats.tokens_processed == sum(n * width for n, width in seen)


@pytest.mark.parametrize(
    ("name", "sync_every"), [("plain", 3), ("jacobi recycling", 1), ("sjd maximal", 3)]
)
def test_captured_steps_have_all_batch_slots_from_the_beginning(name: str, sync_every: int) -> None:
    model = CausalLMWindow(window.tiny("llama"))
    model.setup.runner = Replay(sync_every)
    made, given, arriving = decode_window(name, 2.0, 4, 1, model)
    assert not arriving.waiting
    check_rows(given, window.alone(name, 2.0))
    assert len(model.setup.runner.recorded) == 1 and model.setup.runner.replayed > 3
    assert arriving.asked[0] == 2  # two of four batch slots are free


def test_the_scheduler_holds_only_rows_that_are_not_finished() -> None:
    """So that a run of any length needs no more memory."""
    first = window.prompt([0, 1], 2.0)
    coming = Arriving(window.ALL * 30, lambda rows: window.prompt(rows, 2.0), gap=1)
    batching = ContinuousBatching(2, None, coming)
    scheduler = Scheduler(widened(first), batching, Noise.from_seed([0, 1], 2))
    for turn in range(200):
        slot = turn % 2
        scheduler.finish(slot, FinishedRow(scheduler.rows[slot], torch.zeros(3), 2, [1, 1], 0.5))
        assert scheduler.receive(1) is not None
        assert scheduler.admit([slot]) == [slot]
        assert scheduler.whole.batch == 3 and not scheduler.ended
        row = scheduler.rows[slot]
        assert row == turn + 2
        expected = window.prompt([turn % 7], 2.0)
        own = scheduler.prompt()
        for branch in (0, 1):
            ids = own.tokens[2 * branch + slot, : own.lengths[2 * branch + slot]]
            assert ids.equal(expected.tokens[branch, : expected.lengths[branch]])
        assert int(scheduler.noise().seeds[slot]) == 100 + turn % 7
    assert scheduler.totals.row_passes == 400 and scheduler.totals.accepted == [200, 200]
