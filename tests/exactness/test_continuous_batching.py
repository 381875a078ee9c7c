"""Continuous batching: which rows a pass has, when they are given or join, errors, and graphs.

That a row that is admitted or joins is the row alone is proved in `tests/matrix/test_batching.py`.
Rows end at stop tokens, after 2 to 30 tokens, so that batch slots become free in another order than
that of the prompt's rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import (
    Autoregressive,
    CausalLMWindow,
    ContinuousBatching,
    Jacobi,
    Noise,
    NumericsError,
    SamplingParams,
    Speculative,
    SpeculativeJacobi,
)
from mmaccel.contracts import FinishedRow, Pass, Prompt
from mmaccel.pipelines.hosts.runner.cuda_graphs import GraphCache
from mmaccel.policies import Policy
from mmaccel.results import Generation, Progress
from mmaccel.samplers.scheduling import Scheduler
from tests.exactness.bitwise_runs import PROMPTS
from tests.fixtures.arriving import Arriving
from tests.fixtures.graph_replay import Replay
from tests.fixtures.lanes import every
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import ToyLanguage, make_prompt
from tests.matrix.test_batching import ALL, check_rows, prompt, tiny
from tests.matrix.test_batching import decode as decode_window


def policies() -> dict[str, Policy]:
    return {
        "plain": Autoregressive(),
        "jacobi": Jacobi(6),
        "jacobi recycling": Jacobi(6, "token-recycling"),
        "sjd maximal": SpeculativeJacobi(5),
    }


def decode(
    policy: Policy, rows: list[int], scale: float, batching: ContinuousBatching | None = None, *,
    window: Any = None, **given: Any,
) -> Generation:  # fmt: skip
    window = CausalLMWindow(tiny("llama")) if window is None else window
    return decode_window(policy, window, rows, scale, batching, **given)


@cache
def alone(name: str, scale: float) -> list[Generation]:
    return [decode(policies()[name], [row], scale) for row in ALL]


def test_cached_graphs_serve_runs_with_batching_alone() -> None:
    cache, captures = GraphCache(), []
    window = CausalLMWindow(tiny("llama"))
    for rows, batching in (
        (ALL, ContinuousBatching(3)),
        ([6, 5, 4, 3, 2], ContinuousBatching(3)),
        ([1, 2, 3], None),
    ):
        window.setup.runner = Replay(1, cache)
        given: list[FinishedRow] = []
        made = decode(policies()["jacobi"], rows, 2.0, batching, window=window)
        captures.append(made.stats.captures)
        for k, row in enumerate(rows):
            assert made.tokens[k].equal(alone("jacobi", 2.0)[row].tokens[0])
        assert given == []
    assert captures == [1, 0, 1]


class Strict(ToyLanguage):
    """Forgets positions after a pass, as the contract allows; it refuses rows with holes."""

    def forward(self, entries: Pass) -> Tensor:
        logits = super().forward(entries)
        after = (
            torch.arange(self.memory.shape[1]) >= entries.start[:, None] + entries.tokens.shape[1]
        )
        self.memory.masked_fill_(after, -1)
        return logits


@pytest.mark.parametrize(
    ("policy", "way"),
    [
        (Jacobi(4), "waiting"),
        (Speculative(3), "arriving"),
        (SpeculativeJacobi(4), "chunks of 1"),
        (Jacobi(4), "chunks of 3"),
    ],
    ids=repr,
)
def test_a_model_that_cannot_prefill_some_rows_prefills_all(policy: Policy, way: str) -> None:
    """The other rows process tokens where their next passes begin; batch slots are all there from
    the beginning.
    """

    def read(chosen: list[int], width: int = 5) -> Prompt:
        tokens = [PROMPTS[row] for row in chosen] + [PROMPTS[-1 - row] for row in chosen]
        return make_prompt(tokens, 2, width, stop_tokens=torch.tensor([4]))

    def toy(chosen: list[int], batching: ContinuousBatching | None, size: Any = None) -> Generation:
        model = Strict(5, depth=6)
        model.setup.prefill_chunk_size = size
        prompt = replace(read(chosen), batching=batching)
        noise = Noise.from_seed([100 + row for row in chosen], len(chosen))
        params = SamplingParams(guidance_scale=1.5)
        return policy.sample(model, prompt, 20, params=params, noise=noise)

    given: list[FinishedRow] = []
    first, arriving = [*range(6)], None
    if way == "arriving":
        first, arriving = [0, 1], Arriving([2, 3, 4, 5], read, gap=1)
    batching = ContinuousBatching(2 + (way == "arriving"), given.append, arriving)
    made = toy(first, batching, int(way[-1]) if "chunks" in way else None)
    alone = [toy([row], None) for row in range(6)]
    check_rows(given, alone)
    assert made.stats.row_passes == sum(own.stats.passes for own in alone)


def record_shapes(window: CausalLMWindow) -> list[tuple[int, int]]:
    """Rows and width of every pass of a window's model from now on."""
    seen: list[tuple[int, int]] = []

    def record(_: Any, args: Any, options: Any) -> None:
        seen.append(tuple(options["input_ids"].shape))

    window.model.register_forward_pre_hook(record, with_kwargs=True)
    return seen


def test_only_admitted_rows_are_prefilled_and_ended_rows_leave() -> None:
    """Prompts of 4, 1, 6 and 1 tokens, ended after 2, 1, 4 and 2, in two batch slots."""
    window = CausalLMWindow(build_lm("llama").double())
    seen, shown = record_shapes(window), []

    def on_step(progress: Progress) -> Tensor:
        shown.append((progress.rows, progress.lengths.tolist()))
        return torch.tensor([(2, 1, 4, 2)[row] for row in progress.rows])

    rows, batching = [0, 1, 3, 4], ContinuousBatching(2)
    given: dict[str, Any] = {"window": window, "on_step": on_step, "stop_tokens": None}
    made = decode(Autoregressive(), rows, 2.0, batching, **given)
    assert made.lengths.tolist() == [2, 1, 4, 2] == made.passes.tolist()
    assert shown == [
        ((0, 1), [1, 1]), ((0, 2), [2, 1]), ((3, 2), [1, 2]), ((3, 2), [2, 3]), ((2,), [4]),
    ]  # fmt: skip
    assert seen == [
        (4, 5), (4, 1),  # prompts of two rows in two branches, as wide as the longest of the job
        (2, 5), (4, 1),  # row 2 alone, in two branches
        (4, 1), (4, 1),  # row 3 has one token, which its first pass processes
        (2, 1),  # row 2 has gone on alone
    ]  # fmt: skip
    assert made.stats.tokens_processed == sum(n * width for n, width in seen)
    assert (made.stats.prefill_passes, made.stats.passes) == (2, 5)


def test_rows_are_given_as_soon_as_they_end() -> None:
    passes: list[int] = []
    given: list[tuple[int, int]] = []
    batching = ContinuousBatching(2, lambda row: given.append((row.row, len(passes))))
    decode(Jacobi(6), ALL, 1.0, batching, on_step=lambda progress: passes.append(progress.passes))
    lengths = [own.stats.passes for own in alone("jacobi", 1.0)]
    ends, wanted, waiting = [lengths[0], lengths[1]], [], [*ALL[2:]]  # two queues by hand
    rows = [0, 1]
    while rows:
        slot = ends.index(min(ends))
        wanted.append((rows[slot], ends[slot]))
        if waiting:
            rows[slot] = waiting.pop(0)
            ends[slot] += lengths[rows[slot]]
        else:
            del rows[slot], ends[slot]
    assert given == wanted


def test_an_exception_of_on_finish_reaches_the_caller() -> None:
    given: list[int] = []

    def on_finish(row: FinishedRow) -> None:
        given.append(row.row)
        if len(given) == 3:
            raise LookupError("enough")

    window = CausalLMWindow(tiny("llama"))
    with pytest.raises(LookupError, match="enough"):
        decode(Jacobi(6), ALL, 1.0, ContinuousBatching(2, on_finish), window=window)
    assert len(given) == 3
    again = decode(Jacobi(6), ALL, 1.0, ContinuousBatching(2), window=window)
    assert again.tokens.equal(torch.cat([own.tokens for own in alone("jacobi", 1.0)]))


class Poisoned(CausalLMWindow):
    """Returns NaN after a token 8."""

    def forward(self, entries: Pass) -> Tensor:
        logits = super().forward(entries)
        return logits.masked_fill((entries.tokens[:, :1] == 8)[..., None], float("nan"))


@pytest.mark.parametrize("batching", [None, 1, 2, 3, 7])
def test_an_error_names_its_rows(batching: int | None) -> None:
    """Row 2 ends its prompt with 8; no other row meets an 8 before that."""
    given: list[int] = []
    chosen = (
        None
        if batching is None
        else ContinuousBatching(batching, lambda row: given.append(row.row))
    )
    window = Poisoned(tiny("llama"))
    with pytest.raises(NumericsError) as caught:
        decode(Autoregressive(), ALL, 1.0, chosen, window=window)
    assert caught.value.rows == (2,)
    assert 2 not in given and (batching != 1 or given == [0, 1])


# Rows that join a run.


def join(
    name: str, scale: float, n_slots: int, gap: int, window: Any
) -> tuple[Generation, list[FinishedRow], Arriving]:
    """The first two rows begin, the others join."""
    given: list[FinishedRow] = []
    arriving = Arriving(ALL[2:], lambda rows: prompt(rows, scale), gap)
    batching = ContinuousBatching(n_slots, given.append, arriving)
    made = decode(policies()[name], [0, 1], scale, batching, window=window, width=8)
    return made, given, arriving


def test_batch_slots_come_and_go_with_rows() -> None:
    """A pass computes the rows that are there and no others, and prompts without their padding."""
    model = CausalLMWindow(build_lm("llama").double())
    seen = record_shapes(model)
    made, given, _ = join("plain", 1.0, 9, 2, model)
    check_rows(given, alone("plain", 1.0))
    decoded = [n for n, width in seen if width == 1]
    assert {1, 2, 3} < set(decoded) and len(set(decoded)) > 3
    assert decoded != sorted(decoded) and decoded != sorted(decoded, reverse=True)
    assert sum(decoded) == made.stats.row_passes + 1  # a prompt of two tokens joined alone
    prefills = [shape for shape in seen if shape[1] > 1]
    assert prefills[0] == (2, 3)  # prompts of 4 tokens and 1, though 8 have room
    assert made.stats.tokens_processed == sum(n * width for n, width in seen)


@pytest.mark.parametrize(
    ("name", "sync_every"),
    every(3, [("jacobi recycling", 1), ("plain", 3), ("sjd maximal", 3)]),
)
def test_captured_steps_have_all_batch_slots_from_the_beginning(name: str, sync_every: int) -> None:
    model = CausalLMWindow(tiny("llama"))
    model.setup.runner = Replay(sync_every)
    made, given, arriving = join(name, 2.0, 4, 1, model)
    assert not arriving.waiting
    check_rows(given, alone(name, 2.0))
    assert len(model.setup.runner.recorded) == 1 and model.setup.runner.replayed > 3
    assert arriving.asked[0] == 2  # two of four batch slots are free


def test_the_scheduler_holds_only_rows_that_are_not_finished() -> None:
    """So that a run of any length needs no more memory."""
    coming = Arriving(ALL * 30, lambda rows: prompt(rows, 2.0), gap=1)
    batching = ContinuousBatching(2, None, coming)
    scheduler = Scheduler(prompt([0, 1], 2.0, 8), batching, Noise.from_seed([0, 1], 2))
    for turn in range(200):
        slot = turn % 2
        scheduler.finish(slot, FinishedRow(scheduler.rows[slot], torch.zeros(3), 2, [1, 1], 0.5))
        assert scheduler.receive(1) is not None
        assert scheduler.admit([slot]) == [slot]
        assert scheduler.whole.batch == 3 and not scheduler.ended
        row = scheduler.rows[slot]
        assert row == turn + 2
        expected = prompt([turn % 7], 2.0)
        own = scheduler.prompt()
        for branch in (0, 1):
            ids = own.tokens[2 * branch + slot, : own.lengths[2 * branch + slot]]
            assert ids.equal(expected.tokens[branch, : expected.lengths[branch]])
        assert int(scheduler.noise().seeds[slot]) == 100 + turn % 7
    assert scheduler.totals.row_passes == 400 and scheduler.totals.accepted == [200, 200]
