"""Rows that join a run generate what they generate alone, and the run forgets those that ended.

References and cases are those of `test_continuous_batching` and `test_canvas_batching`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mmaccel import CausalLMWindow, ContinuousBatching, Jacobi, Noise, SamplingParams, ShapeError
from mmaccel.contracts import Arrivals, FinishedRow, Prompt
from mmaccel.results import Generation
from mmaccel.samplers.scheduling import Scheduler
from tests.exactness import test_canvas_batching as canvas
from tests.exactness import test_continuous_batching as window
from tests.fixtures.graph_replay import Replay
from tests.fixtures.toy_models import ToyLanguage, make_prompt

Joiner = Callable[[list[int]], Prompt]


class Arriving:
    """Lets rows join a few passes after each other, and remembers what was asked.

    Args:
        rows: that join, in this order.
        build: their prompt.
        gap: passes with room between two arrivals.
        most: rows that arrive together at most.
    """

    def __init__(self, rows: list[int], build: Joiner, gap: int = 3, most: int = 2) -> None:
        self.waiting, self._build, self._gap, self._most = [*rows], build, gap, most
        self.asked: list[int] = []

    def __call__(self, most: int) -> Arrivals | None:
        self.asked.append(most)
        is_time = len(self.asked) % self._gap == 0 or most >= 9
        rows = self.waiting[: min(most, self._most)] if is_time else []
        del self.waiting[: len(rows)]
        if not rows:
            return None
        return Arrivals(self._build(rows), Noise.from_seed([100 + row for row in rows], len(rows)))


def assert_rows(given: list[FinishedRow], wanted: list[Generation]) -> None:
    assert sorted(row.row for row in given) == list(range(len(wanted)))
    for row in given:
        own = wanted[row.row]
        assert row.tokens.tolist() == own.tokens[0, : int(own.lengths[0])].tolist()
        assert (row.passes, row.accepted) == (int(own.passes[0]), own.stats.accepted)


def window_prompt(rows: list[int], scale: float) -> Prompt:
    tokens = [window.ROWS[row] for row in rows]
    tokens += [window.OTHERS[row] for row in rows] * (scale != 1)
    return make_prompt(tokens, 1 + (scale != 1), stop_tokens=torch.tensor(window.STOPS))


def widened(prompt: Prompt, width: int = 8) -> Prompt:
    """With room for longer prompts."""
    pad = width - prompt.tokens.shape[1]
    return replace(prompt, tokens=torch.nn.functional.pad(prompt.tokens, (0, pad)))


def decode_window(
    name: str, scale: float, n_slots: int, gap: int, model: Any = None
) -> tuple[Generation, list[FinishedRow], Arriving]:
    """The first two rows begin, the others join."""
    given: list[FinishedRow] = []
    arriving = Arriving(window.ALL[2:], lambda rows: window_prompt(rows, scale), gap)
    batching = ContinuousBatching(n_slots, given.append, arriving)
    made = window.policies()[name].sample(
        model or CausalLMWindow(window.tiny("llama")),
        replace(widened(window_prompt([0, 1], scale)), batching=batching),
        window.LENGTH,
        params=SamplingParams(guidance_scale=scale, top_k=20),
        noise=Noise.from_seed([100, 101], 2),
    )
    return made, given, arriving


@pytest.mark.parametrize("scale", [1.0, 2.0], ids=["free", "guided"])
@pytest.mark.parametrize("name", [name for name in window.policies() if "adaptive" not in name])
def test_a_row_that_joins_is_the_row_alone(name: str, scale: float, fused: bool) -> None:
    wanted = window.alone(name, scale, fused)
    model = CausalLMWindow(window.tiny("llama"), fused=fused)
    for n_slots, gap in ((2, 1), (3, 2), (9, 2)):
        made, given, arriving = decode_window(name, scale, n_slots, gap, model)
        if arriving.waiting:  # the run was empty before they came
            continue
        assert_rows(given, wanted)
        stats, total = made.stats, sum(own.stats.passes for own in wanted)
        assert made.tokens.shape == (0, window.LENGTH)
        assert stats.tokens == sum(own.stats.tokens for own in wanted)
        assert stats.row_passes == total > stats.passes
        assert 0 < max(arriving.asked) <= n_slots
    assert not arriving.waiting


def test_batch_slots_come_and_go_with_rows() -> None:
    """A pass computes the rows that are there and no others, and prompts without their padding."""
    model = CausalLMWindow(window.build_lm("llama").double())
    seen = window.record_shapes(model)
    made, given, _ = decode_window("plain", 1.0, 9, 2, model)
    assert_rows(given, window.alone("plain", 1.0))
    decoded = [n for n, width in seen if width == 1]
    assert {1, 2, 3} < set(decoded) and len(set(decoded)) > 3
    assert decoded != sorted(decoded) and decoded != sorted(decoded, reverse=True)
    assert sum(decoded) == made.stats.row_passes + 1  # a prompt of two tokens joined alone
    prefills = [shape for shape in seen if shape[1] > 1]
    assert prefills[0] == (2, 3)  # prompts of 4 tokens and 1, though 8 have room
    assert made.stats.tokens_processed == sum(n * width for n, width in seen)


@pytest.mark.parametrize(
    "name", ["plain", "jacobi", "jacobi ngram", "jacobi recycling", "sjd maximal"]
)
@pytest.mark.parametrize("sync_every", [1, 3])
def test_captured_steps_have_all_batch_slots_from_the_beginning(name: str, sync_every: int) -> None:
    model = CausalLMWindow(window.tiny("llama"))
    model.runner = Replay(sync_every)
    made, given, arriving = decode_window(name, 2.0, 4, 1, model)
    assert not arriving.waiting
    assert_rows(given, window.alone(name, 2.0))
    assert len(model.runner.recorded) == 1 and model.runner.replayed > 3
    assert arriving.asked[0] == 2  # two of four batch slots are free


def test_a_model_that_cannot_prefill_some_rows_has_all_batch_slots_too() -> None:
    rows = [[1, 2, 3], [0], [4, 4], [2, 2, 2, 2], [0, 1], [3, 0, 3, 0, 3]]

    def prompt(chosen: list[int]) -> Prompt:
        return make_prompt([rows[row] for row in chosen], stop_tokens=torch.tensor([4]))

    def toy(first: Prompt, seeds: list[int], batching: ContinuousBatching | None) -> Generation:
        return Jacobi(4).sample(
            window.Strict(5, depth=6),
            replace(first, batching=batching),
            20,
            params=SamplingParams(),
            noise=Noise.from_seed(seeds, len(seeds)),
        )

    wanted = [toy(prompt([row]), [100 + row], None) for row in range(6)]
    given: list[FinishedRow] = []
    arriving = Arriving([2, 3, 4, 5], prompt, gap=1)
    toy(widened(prompt([0, 1])), [100, 101], ContinuousBatching(3, given.append, arriving))
    assert_rows(given, wanted)
    assert isinstance(window.Strict(5), ToyLanguage)


def test_the_scheduler_holds_only_rows_that_are_not_finished() -> None:
    """So that a run of any length needs no more memory."""
    first = window_prompt([0, 1], 2.0)
    coming = Arriving(window.ALL * 30, lambda rows: window_prompt(rows, 2.0), gap=1)
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
        expected = window_prompt([turn % 7], 2.0)
        own = scheduler.prompt()
        for branch in (0, 1):
            ids = own.tokens[2 * branch + slot, : own.lengths[2 * branch + slot]]
            assert ids.equal(expected.tokens[branch, : expected.lengths[branch]])
        assert int(scheduler.noise().seeds[slot]) == 100 + turn % 7
    assert scheduler.totals.row_passes == 400 and scheduler.totals.accepted == [200, 200]


@pytest.mark.parametrize(
    "prompt",
    [window_prompt([0, 1, 2], 2.0), window_prompt([0], 1.0), widened(window_prompt([0], 2.0), 9)],
    ids=["too many", "without branches", "too long"],
)
def test_rows_that_do_not_fit_are_refused(prompt: Prompt) -> None:
    arrived = Arrivals(prompt, Noise.from_seed(list(range(prompt.batch)), prompt.batch))
    batching = ContinuousBatching(4, None, lambda most: arrived)
    first = widened(window_prompt([0, 1], 2.0))
    scheduler = Scheduler(first, batching, Noise.from_seed([0, 1], 2))
    with pytest.raises(ShapeError, match="arrivals: expected 1..2 rows of 2 branches"):
        scheduler.receive(2)


def test_prompts_with_images_are_refused() -> None:
    prompt = window_prompt([0], 1.0)
    prompt = replace(prompt, is_text=torch.ones_like(prompt.tokens, dtype=torch.bool))
    arrived = Arrivals(prompt, Noise.from_seed([0], 1))
    batching = ContinuousBatching(4, None, lambda most: arrived)
    scheduler = Scheduler(widened(window_prompt([0, 1], 1.0)), batching, Noise.from_seed([0, 1], 2))
    with pytest.raises(ShapeError, match="expected prompts of text alone"):
        scheduler.receive(2)


@pytest.mark.parametrize("guided", [False, True], ids=["free", "guided"])
@pytest.mark.parametrize("name", ["stepwise", "stepwise uniform", "entropy", "maskgit", "redo"])
def test_rows_join_a_canvas(name: str, guided: bool) -> None:
    wanted = [canvas.decode(canvas.CASES[name], [row], guided) for row in canvas.ALL]
    given: list[FinishedRow] = []
    arriving = Arriving(
        canvas.ALL[2:], lambda rows: canvas.prompt(canvas.CASES[name][0], rows, guided), 2
    )
    model = canvas.Counted(canvas.model_of(canvas.CASES[name][0]))
    first, policy = canvas.prompt(canvas.CASES[name][0], [0, 1], guided), canvas.CASES[name][1]
    made = policy.sample(
        model,
        replace(widened(first, 7), batching=ContinuousBatching(4, given.append, arriving)),
        canvas.LENGTH,
        params=SamplingParams(guidance_scale=1.7 if guided else 1.0, top_k=20),
        noise=Noise.from_seed([100, 101], 2),
    )
    assert not arriving.waiting
    assert_rows(given, wanted)
    if name != "redo":  # whose cache keeps all batch slots in every pass
        assert sum(model.rows) == (1 + guided) * sum(own.stats.passes for own in wanted)
    assert made.stats.row_passes == sum(own.stats.row_passes for own in wanted)
    assert made.stats.passes < made.stats.row_passes and made.tokens.shape[0] == 0
