"""A captured step makes the tokens that running every pass makes, and reads nothing back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmaccel import (
    Autoregressive,
    CausalLMWindow,
    Grid,
    GroupedSpeculative,
    Jacobi,
    Noise,
    SamplingParams,
    SpeculativeJacobi,
)  # fmt: skip
from mmaccel.contracts import Policy
from mmaccel.results import Generation
from mmaccel.samplers.window.step_runner import EagerRunner
from tests.fixtures.graph_replay import HostSync, Replay
from tests.fixtures.tiny_lms import VOCAB, build_lm
from tests.fixtures.toy_models import make_prompt

ROWS = [[5, 9, 11, 2], [7], [8, 8]]
OTHERS = [[4], [6, 6, 6], [4]]
LENGTH = 40
GRID = Grid(rows=5, width=7, vocab_size=VOCAB, tokens=(4, VOCAB), row_end=3)
FILTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "filtered": {"temperature": 1.3, "top_k": 12, "top_p": 0.95, "min_p": 0.01},
    "guided": {"guidance_scale": 2.0, "top_k": 10},
}
POLICIES: list[Policy] = [
    Autoregressive(),
    Jacobi(window=6),
    Jacobi(window=6, drafts="ngram"),
    Jacobi(window=6, drafts="above"),
    SpeculativeJacobi(window=5),
    SpeculativeJacobi(window=5, coupling="gumbel"),
    SpeculativeJacobi(window=5, coupling="independent", drafts="left"),
    GroupedSpeculative(window=5, group=3),
]


def decode(
    policy: Policy, runner: Replay | EagerRunner | None, *, model: str = "llama", stop: Any = None,
    grid: Grid | None = GRID, on_step: Any = None, **options: Any,
) -> Generation:  # fmt: skip
    window = CausalLMWindow(build_lm(model), stride=None if runner is None else "auto")
    window.runner = runner
    guided = "guidance_scale" in options
    prompt = make_prompt(
        ROWS + (OTHERS if guided else []), 2 if guided else 1, layout=grid, stop_tokens=stop
    )
    noise = Noise.from_seed([3, 4, 5], 3)
    length = grid.frame if grid is not None else LENGTH
    params = SamplingParams(**options)
    return policy.sample(window, prompt, length, params=params, noise=noise, on_step=on_step)


def assert_like(captured: Generation, plain: Generation) -> None:
    assert captured.tokens.equal(plain.tokens) and captured.lengths.equal(plain.lengths)
    assert captured.passes.equal(plain.passes)
    mine, theirs = captured.stats, plain.stats
    assert (mine.tokens, mine.row_passes, mine.accepted) == (
        theirs.tokens, theirs.row_passes, theirs.accepted,
    )  # fmt: skip
    assert mine.total_variation == pytest.approx(theirs.total_variation, rel=1e-12)
    assert (mine.runner, theirs.runner) == ("cuda graphs", "eager")


@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_captured_step_makes_the_same_tokens(policy: Policy, options: dict[str, Any]) -> None:
    runner = Replay()
    captured = decode(policy, runner, **options)
    assert runner.replayed > 3 and len(runner.recorded) == 1  # one width, one record
    assert captured.stats.passes == runner.replayed + 3  # the first, one to warm up, one recorded
    assert_like(captured, decode(policy, None, **options))


@pytest.mark.parametrize("model", ["qwen3", "gemma3", "gpt2", "mistral"])
def test_of_other_models(model: str) -> None:
    captured = decode(Jacobi(window=6), Replay(), model=model)
    assert_like(captured, decode(Jacobi(window=6), None, model=model))


@pytest.mark.parametrize("sync_every", [2, 5])
def test_several_passes_between_two_looks(sync_every: int) -> None:
    """Rows end as without graphs; passes after the last token are counted and change nothing."""
    runner = Replay(sync_every)
    captured = decode(Jacobi(window=6), runner, grid=None)
    plain = decode(Jacobi(window=6), None, grid=None)
    assert_like(captured, plain)
    surplus = captured.stats.passes - plain.stats.passes
    assert 0 <= surplus < sync_every
    assert (captured.stats.passes - 1) % sync_every == 0  # the first is synchronised alone


def test_several_passes_between_two_looks_without_a_record() -> None:
    looked_late = decode(Jacobi(window=6), EagerRunner(3), grid=None)
    plain = decode(Jacobi(window=6), None, grid=None)
    assert looked_late.tokens.equal(plain.tokens) and looked_late.passes.equal(plain.passes)
    assert looked_late.stats.accepted == plain.stats.accepted


def test_stop_tokens_end_rows() -> None:
    stop = torch.tensor([9, 17])
    captured = decode(Jacobi(window=6), Replay(), grid=None, stop=stop)
    assert_like(captured, decode(Jacobi(window=6), None, grid=None, stop=stop))
    assert int(captured.lengths.min()) < LENGTH


def test_on_step_sees_every_pass_and_ends_rows() -> None:
    seen: dict[str, list[Any]] = {"graph": [], "eager": []}

    def watch(name: str) -> Any:
        def on_step(progress: Any) -> Any:
            made, previous = progress.lengths.tolist(), progress.previous.tolist()
            tokens = [row[:n] for row, n in zip(progress.tokens.tolist(), made)]
            seen[name].append((made, previous, tokens, progress.passes))
            return torch.tensor([11, LENGTH, 2])

        return on_step

    runner = Replay(sync_every=4)  # a callback is called after every pass all the same
    captured = decode(Jacobi(window=6), runner, grid=None, on_step=watch("graph"))
    plain = decode(Jacobi(window=6), None, grid=None, on_step=watch("eager"))
    assert captured.tokens.equal(plain.tokens) and runner.replayed > 3
    assert seen["graph"] == seen["eager"] and captured.lengths.tolist() == [11, LENGTH, 2]


def test_the_adaptive_window_records_each_width_once() -> None:
    runner = Replay()
    options = {"grid": None, "model": "llama"}
    captured = decode(Jacobi(window="adaptive"), runner, **options)
    plain = decode(Jacobi(window=8), None, **options)
    assert captured.tokens.equal(plain.tokens)
    assert len(set(runner.recorded)) == len(runner.recorded) and set(runner.recorded) <= {
        1,
        8,
        16,
        32,
    }


def test_a_row_end_records_no_narrower_window() -> None:
    runner = Replay()
    decode(Jacobi(window=16), runner, grid=None)
    assert runner.recorded == [16]


def test_the_replay_tells_a_step_that_reads_back() -> None:
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
