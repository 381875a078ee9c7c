"""Runs that replay an earlier run's graphs, in its static buffers, make what fresh runs make."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
from mmaccel.kernels import dispatch
from mmaccel.pipelines.runner.cuda_graphs import GraphCache
from mmaccel.results import Generation
from tests.exactness.test_graph_capture import assert_like as assert_equal
from tests.fixtures.graph_replay import Replay
from tests.fixtures.tiny_lms import VOCAB, build_lm
from tests.fixtures.toy_models import make_prompt

GRID = Grid(rows=4, width=6, vocab_size=VOCAB, tokens=(4, VOCAB), row_end=3)
FILTERED = {"guidance_scale": 2.0, "temperature": 1.3, "top_k": 12, "top_p": 0.95, "min_p": 0.01}
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


def decode(
    policy: Policy, call: Call, cache: GraphCache | None, model: Any = None, on_step: Any = None,
    sync_every: int = 1,
) -> Generation:  # fmt: skip
    """One call, in a window of its own, as `attach` has it; without a cache pass by pass."""
    window = CausalLMWindow(build_lm("llama") if model is None else model)
    window.runner = None if cache is None else Replay(sync_every, cache)
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
    spent = captured.stats.total_variation
    assert spent == pytest.approx(plain.stats.total_variation, rel=1e-5)
    stats = replace(captured.stats, total_variation=plain.stats.total_variation)
    assert_equal(replace(captured, stats=stats), plain)


@pytest.fixture(scope="module")
def model() -> Any:
    return build_lm("llama")


@pytest.mark.parametrize("options", [{}, FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_calls_with_one_key_share_graphs(
    policy: Policy, options: dict[str, Any], model: Any
) -> None:
    cache, captures = GraphCache(), []
    for call in CALLS:
        call = replace(call, params=options)
        made = decode(policy, call, cache, model)
        assert_like(made, decode(policy, call, None, model))
        captures.append(made.stats.captures)
    assert captures == [1, 0, 0] and len(cache) == 1


@pytest.mark.parametrize("policy", [Jacobi(window=6), SpeculativeJacobi(window=5)], ids=repr)
def test_where_kernels_draw(policy: Policy, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the kernels' functions, which take seeds as they are (torch specifications)."""
    monkeypatch.setattr(dispatch, "takes", lambda *_: True)
    cache = GraphCache()
    for call, n in zip(CALLS, (1, 0, 0)):
        made = decode(policy, call, cache, model)
        assert_like(made, decode(policy, call, None, model))
        assert made.stats.captures == n


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt2", "mistral"])
def test_of_other_models(name: str) -> None:
    cache, model = GraphCache(), build_lm(name)
    for call, n in zip(CALLS[:2], (1, 0)):
        made = decode(Jacobi(window=6), call, cache, model)
        assert_like(made, decode(Jacobi(window=6), call, None, model))
        assert made.stats.captures == n


def test_rows_stop_where_they_stop(model: Any) -> None:
    """Stop tokens are numbers of a call, and a row that ended in one call is open in the next."""
    cache, ends = GraphCache(), []
    for stops in ((9, 17), (30, 12), (20, 20), (9, 17)):
        call = replace(CALLS[0], stops=stops, layout=None)
        made = decode(Jacobi(window=6), call, cache, model)
        assert_like(made, decode(Jacobi(window=6), call, None, model))
        ends.append(made.lengths.tolist())
    assert len(cache) == 1 and ends[0] == ends[3] and len({str(end) for end in ends}) == 3


@pytest.mark.parametrize("sync_every", [2, 5])
def test_several_passes_between_two_looks(sync_every: int, model: Any) -> None:
    cache = GraphCache()
    for call, n in zip(CALLS, (1, 0, 0)):
        made = decode(Jacobi(window=6), call, cache, model, sync_every=sync_every)
        assert_like(made, decode(Jacobi(window=6), call, None, model))
        assert made.stats.captures == n


@pytest.mark.parametrize("policy", [Jacobi(window=6), GroupedSpeculative(window=5, group=3)])
def test_a_callback_sees_its_own_call(policy: Policy, model: Any) -> None:
    """Counting lies outside the graph here; what a pass spent is that pass's all the same."""
    cache, seen = GraphCache(), []

    def watch(progress: Any) -> Any:
        made = progress.lengths.tolist()
        tokens = [row[:n] for row, n in zip(progress.tokens.tolist(), made)]
        seen.append((made, progress.previous.tolist(), tokens, progress.passes))
        return torch.tensor([11, 20])

    for call, n in zip(CALLS, (1, 0, 0)):
        made = decode(policy, call, cache, model, watch)
        recorded, seen = seen, []
        assert_like(made, decode(policy, call, None, model, watch))
        assert recorded == seen and made.stats.captures == n
        seen = []


def test_the_adaptive_window_captures_its_widths_once(model: Any) -> None:
    cache, widths = GraphCache(), 0
    for _ in range(2):
        for call in CALLS:
            made = decode(Jacobi(window="adaptive"), call, cache, model)
            plain = decode(Jacobi(window=8), call, None, model)
            assert made.tokens.equal(plain.tokens)
            widths += made.stats.captures
    assert 1 <= widths <= 5 and len(cache) == 1  # each width once
