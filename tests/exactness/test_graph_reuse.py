"""Which passes of a run are captured or replayed, and where graphs of an earlier run serve.

That captured runs generate what eager ones do is proved in `tests/matrix/test_batching.py`.

`Replay` records a step's operations in place of a GPU and refuses host synchronisations.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from mmaccel import (
    CausalLMWindow,
    Comb,
    Grid,
    GroupedSpeculative,
    Jacobi,
    Noise,
    SamplingParams,
    Sequoia,
    SpeculativeJacobi,
)
from mmaccel.kernels import dispatch
from mmaccel.pipelines.hosts.runner.cuda_graphs import GraphCache
from mmaccel.pipelines.hosts.runner.fused_decoder import FusedDecoder
from mmaccel.policies import Policy
from mmaccel.results import Generation
from mmaccel.samplers.trees import growth
from mmaccel.samplers.window import steps
from mmaccel.samplers.window.step_runner import Once, StepRunner
from tests.fixtures.graph_replay import HostSync, Replay, Tried
from tests.fixtures.tiny_lms import VOCAB, build_lm
from tests.fixtures.toy_models import make_prompt

GRID = Grid(rows=4, width=6, vocab_size=VOCAB, tokens=(4, VOCAB), row_end=3)
PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "filtered": {
        "guidance_scale": 2.0, "temperature": 1.3, "top_k": 12, "top_p": 0.95, "min_p": 0.01,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """What differs between calls with one key."""

    rows: tuple[tuple[int, ...], ...]
    seeds: tuple[int, ...] = (3, 4)
    length: int = 28
    stops: tuple[int, ...] = ()
    params: dict[str, Any] = field(default_factory=dict)
    layout: Grid | None = GRID


CALLS = (  # other prompts, lengths of prompts, seeds, lengths
    Call(((5, 9, 11, 2), (7,))),
    Call(((4,), (6, 6, 6, 30, 31, 9, 8)), (9, 8), 17),
    Call(((1, 2), (8, 8)), (3, 2**63), 23),
)


FREE = replace(CALLS[0], layout=None, length=40)


def decode(
    policy: Policy, call: Call, cache: GraphCache | None, model: Any = None, on_step: Any = None,
    sync_every: int = 1, runner: Replay | StepRunner | None = None, fused: bool = False,
    window: Any = None,
) -> Generation:  # fmt: skip
    """One call, in a window of its own, as in `attach`; without cache and runner pass by pass."""
    if window is None:
        window = CausalLMWindow(build_lm("llama") if model is None else model, fused=fused)
    window.setup.runner = runner if cache is None else Replay(sync_every, cache)
    guided = "guidance_scale" in call.params
    rows = [list(row) for row in call.rows]
    rows += [[*row[::-1], 4] for row in rows] if guided else []
    stops = torch.tensor(call.stops) if call.stops else None
    prompt = make_prompt(rows, 1 + guided, layout=call.layout, stop_tokens=stops)
    noise = Noise.from_seed(call.seeds, len(call.seeds))
    params = SamplingParams(**call.params)
    return policy.sample(window, prompt, call.length, params=params, noise=noise, on_step=on_step)


def assert_like(captured: Generation, plain: Generation) -> None:
    """A cached run has more capacity than its prompt needs, so sums of scores round otherwise."""
    assert captured.tokens.equal(plain.tokens) and captured.lengths.equal(plain.lengths)
    assert captured.passes.equal(plain.passes)
    mine, theirs = captured.stats, plain.stats
    assert (mine.tokens, mine.row_passes, mine.accepted) == (
        theirs.tokens,
        theirs.row_passes,
        theirs.accepted,
    )
    assert mine.total_variation == pytest.approx(theirs.total_variation, rel=1e-5)
    assert (mine.runner, theirs.runner) == ("cuda graphs", "eager")


JACOBI = Jacobi(window=6)


def check(
    call: Call, cache: GraphCache, model: Any, captures: int, policy: Policy = JACOBI, **given: Any
) -> Generation:
    """A call with cached graphs is its eager run; how many passes it captures."""
    made = decode(policy, call, cache, model, **given)
    assert_like(made, decode(policy, call, None, model, **given))
    assert made.stats.captures == captures
    return made


@pytest.fixture(scope="module")
def model() -> Any:
    return build_lm("llama")


@pytest.mark.parametrize("policy", [Jacobi(window=6), SpeculativeJacobi(window=5)], ids=repr)
def test_where_kernels_draw(
    policy: Policy, model: Any, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the kernels' functions, which take seeds as they are (torch specifications)."""
    monkeypatch.setattr(dispatch, "uses_triton", lambda *_: True)
    monkeypatch.setattr(FusedDecoder, "has_row_products", False)
    cache = GraphCache()
    for call, captures in zip(CALLS, (1, 0, 0)):
        check(call, cache, model, captures, policy, fused=fused)


def test_stop_tokens_are_inputs_of_a_call(model: Any) -> None:
    """Their ids are static inputs, and a row that ended in one call is open in the next."""
    cache, ends = GraphCache(), []
    for stops, captures in (((9, 17), 1), ((30, 12), 0), ((20, 20), 0), ((9, 17), 0)):
        call = replace(CALLS[0], stops=stops, layout=None)
        ends.append(check(call, cache, model, captures).lengths.tolist())
    assert len(cache) == 1 and ends[0] == ends[3] and len({str(end) for end in ends}) == 3


@pytest.mark.parametrize("policy", [Jacobi(window=6), GroupedSpeculative(window=5, group=3)])
def test_a_callback_sees_its_own_call(policy: Policy, model: Any) -> None:
    """Counting is outside the graph here; the variation counted is still that of its pass."""
    cache, seen = GraphCache(), []

    def watch(progress: Any) -> Any:
        made = progress.lengths.tolist()
        tokens = [row[:n] for row, n in zip(progress.tokens.tolist(), made)]
        seen.append((made, progress.previous.tolist(), tokens, progress.passes))
        return torch.tensor([11, 20])

    for call, captures in zip(CALLS, (1, 0, 0)):
        check(call, cache, model, captures, policy, on_step=watch)
        half = len(seen) // 2  # of the captured call, then of the eager one
        assert seen[:half] == seen[half:]
        seen.clear()


@pytest.mark.parametrize("sync_every", [2, 5])
def test_passes_after_the_last_token(sync_every: int, model: Any) -> None:
    """They are counted and change nothing, captured or not."""
    plain = decode(JACOBI, FREE, None, model)
    for runner in (Replay(sync_every), StepRunner(sync_every)):
        made = decode(JACOBI, FREE, None, model, runner=runner)
        assert made.tokens.equal(plain.tokens) and made.passes.equal(plain.passes)
        assert made.stats.accepted == plain.stats.accepted
        assert 0 <= made.stats.passes - plain.stats.passes < sync_every
        assert (made.stats.passes - 1) % sync_every == 0  # the first is synchronised alone


def test_on_step_is_called_after_every_pass(model: Any) -> None:
    runner, passes = Replay(sync_every=4), []
    made = decode(JACOBI, FREE, None, model, lambda p: passes.append(p.passes), 1, runner)
    assert passes == list(range(1, made.stats.passes + 1)) and runner.replayed > 3


def test_entries_of_trees_are_counted_in_replays(model: Any) -> None:
    """Two rows, six slots and six nodes; the prompt is counted as ever."""
    cache, policy = GraphCache(), Jacobi(6, "token-recycling", Comb(3, 2))
    plain = decode(Jacobi(6, "token-recycling"), CALLS[0], GraphCache(), model).stats
    n_prompt = plain.tokens_processed - plain.passes * 2 * 6
    for _ in range(4):
        stats = decode(policy, CALLS[0], cache, model).stats
        assert stats.tokens_processed == n_prompt + stats.passes * 2 * (6 + 6)


def test_a_step_with_a_tree_copies_nothing_from_the_host(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list that becomes an index is such a copy: `Replay` refuses it."""
    policy = Jacobi(6, "token-recycling", Sequoia(6, depth=2, acceptance=((0.5, 0.3, 0.1),)))
    assert decode(policy, CALLS[0], GraphCache(), model).stats.captures == 1

    def make(values: Any, device: Any) -> torch.Tensor:
        return torch.tensor(values, device=device)

    monkeypatch.setattr(growth, "as_index", make)
    with pytest.raises(HostSync):
        decode(policy, CALLS[0], GraphCache(), model)


@pytest.mark.slow
def test_a_prompt_that_cannot_be_captured_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """So does a first pass; the passes after it are captured all the same. Long prompts and rows
    that take turns have no graph of a prompt.
    """
    policy, prefill = JACOBI, CausalLMWindow.prefill

    def look(*given: Any) -> None:
        float(torch.zeros(()))
        prefill(*given)

    def decode_often(cache: GraphCache) -> list[Hashable]:
        own, recorded = build_lm("llama"), list[Hashable]()
        plain = decode(policy, CALLS[0], None, own)
        for _ in range(4):
            runner = Tried(cache=cache)
            made = decode(policy, CALLS[0], None, own, runner=runner)
            assert_like(made, plain)
            recorded += runner.recorded
        return recorded

    with monkeypatch.context() as changed:
        changed.setattr(CausalLMWindow, "prefill", look)
        assert decode_often(GraphCache()) == [6, Once("first pass", 6)]
    with monkeypatch.context() as changed:
        changed.setattr(steps, "_SHORT", 2 * 64 - 1)  # of two rows
        assert decode_often(GraphCache()) == [6, Once("first pass", 6)]
    with monkeypatch.context() as changed:
        changed.setattr(Replay, "capture", _refuse_once(Replay.capture))
        assert decode_often(GraphCache()) == [6]
    assert decode_often(GraphCache()) == [6, Once("prompt", 3), Once("first pass", 6)]


def _refuse_once(capture: Any) -> Any:
    """No memory for any graph after the first."""
    made: list[object] = []

    def refuse(self: Replay, step: Any) -> Any:
        made.append(step)
        if len(made) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return capture(self, step)

    return refuse


def test_a_row_end_records_no_narrower_window() -> None:
    runner = Replay()
    decode(Jacobi(window=16), FREE, None, runner=runner)
    assert runner.recorded == [16]


def test_the_replay_refuses_a_step_that_reads_back() -> None:
    """The test of the test: a host synchronisation inside a pass is found."""
    runner, total = Replay(), torch.zeros(())
    runner.run_step(1, lambda: total.add_(1))
    with pytest.raises(HostSync):
        runner.run_step(1, lambda: total.add_(float(total)))


def test_the_replay_runs_no_python() -> None:
    runner, total, calls = Replay(), torch.zeros(()), []

    def step() -> None:
        calls.append(len(calls))
        total.add_(len(calls))  # a number of the host is a constant

    for _ in range(5):
        runner.run_step(1, step)
    assert len(calls) == 2 and float(total) == 1 + 2 + 2 + 2 + 2
