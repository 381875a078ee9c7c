"""Which graphs an attached policy and a decoder cache between calls, and when they drop them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel import GroupedSpeculative, Jacobi, NumericsError
from mmaccel.pipelines.hosts.runner.cuda_graphs import GraphCache
from mmaccel.pipelines.hosts.runner.engine import Engine
from mmaccel.results import Stats
from mmaccel.samplers.window import steps
from tests.fixtures.graph_replay import Replay
from tests.fixtures.tiny_lms import build_lm, left_padded
from tests.runner.test_engine import Counting

SHORT = [[5, 9, 11, 2], [7]]
JACOBI = Jacobi(window=4)
LONG = [[4], [6, 6, 6, 30, 31, 9, 8]]


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[GraphCache]:
    """Engines capture passes as on a GPU; the caches of each call's graphs."""
    found: list[GraphCache] = []

    def choose(self: Engine, *_: Any) -> Replay:
        found.append(self.cache)
        return Replay(self.sync_every, self.cache)

    monkeypatch.setattr(Engine, "runner", choose)
    return found


def captures(history: list[Stats]) -> list[int]:
    assert all(stats.runner == "cuda graphs" and not stats.fallbacks for stats in history)
    return [stats.captures for stats in history]


def sample(model: Any, rows: list[list[int]], **options: Any) -> Any:
    return model.generate(
        **left_padded(rows), **{"max_new_tokens": 20, "do_sample": True} | options
    )


def test_detaching_drops_all_graphs(caches: list[GraphCache]) -> None:
    model, other = build_lm("llama"), build_lm("llama")
    with mmaccel.attach(model, JACOBI) as run:
        for _ in range(2):
            sample(model, SHORT)
        assert caches[0] is caches[1] and len(caches[0]) == 1
        with mmaccel.attach(other, JACOBI):
            sample(other, SHORT)
        assert caches[2] is not caches[0] and len(caches[2]) == 0
    assert captures(run.history) == [1, 0] and len(caches[0]) == 0
    with mmaccel.attach(model, JACOBI) as run:
        sample(model, SHORT)
    assert captures(run.history) == [1]


def test_reset_drops_all_graphs(caches: list[GraphCache], monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook moves no parameter: graphs captured before it go on without it until `reset`."""
    model = build_lm("llama")
    with mmaccel.attach(model, JACOBI, seed=3) as run:
        before = sample(model, SHORT)
        model.model.norm.register_forward_hook(lambda module, args, out: out * 0.1)
        run.reset()
        assert len(caches[0]) == 0
        after = sample(model, SHORT)
    assert captures(run.history) == [1, 1] and not after.equal(before)
    monkeypatch.setattr(Engine, "runner", lambda *_: None)
    with mmaccel.attach(model, JACOBI, seed=3):
        assert sample(model, SHORT).equal(after)


def test_a_decoder_reuses_its_graphs_until_its_engine_is_closed(caches: list[GraphCache]) -> None:
    model, decoder = build_lm("llama"), mmaccel.decoder(GroupedSpeculative(window=4), strict=True)
    for rows in (SHORT, LONG):
        sample(model, rows, custom_generate=decoder)
    decoder.engine.close()
    sample(model, SHORT, custom_generate=decoder)
    assert captures(decoder.history) == [1, 0, 1]
    assert mmaccel.decoder(Jacobi()).engine.cache is not decoder.engine.cache


def test_invalid_logits_leave_no_graphs(caches: list[GraphCache]) -> None:
    """NaN in a cached key/value cache would come through a mask."""
    model = build_lm("llama")
    with mmaccel.attach(model, JACOBI, seed=3) as run:
        first = sample(model, SHORT)
        with torch.no_grad():
            weight = model.model.layers[0].self_attn.v_proj.weight
            before = weight.clone()
            weight.fill_(float("nan"))
            with pytest.raises(NumericsError):
                sample(model, SHORT)
            weight.copy_(before)
        assert sample(model, SHORT).equal(first)
    assert captures(run.history) == [1, 1]


def test_cached_graphs_are_dropped_before_a_capture_falls_back(caches: list[GraphCache]) -> None:
    """Without memory, cached graphs are freed and the capture is repeated once."""
    engine, runs = Engine(), []
    for failures, log in (
        (1, ["trial", "warm up", "free", "capture", "replay"]),
        (2, ["trial", "warm up", "free", "free"]),
    ):
        cache_one(engine)
        runner = Counting(failures=failures, cache=engine.cache)
        runner.run_step(8, lambda: runs.append(1))
        assert len(engine.cache) == 1
        runner.run_step(8, lambda: runs.append(1))
        assert len(engine.cache) == 0 and runner.log == log
        assert (runner.name, runner.captures) == (
            ("cuda graphs", 1) if failures == 1 else ("eager", 0)
        )
    assert len(runs) == 4


def cache_one(engine: Engine) -> None:
    decoder = mmaccel.decoder(JACOBI)
    decoder.options = replace(decoder.options, engine=engine)
    sample(build_lm("llama"), SHORT, custom_generate=decoder)
    assert len(engine.cache) == 1


def test_no_memory_for_a_prompt_drops_cached_graphs(
    caches: list[GraphCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeated once where graphs were dropped, of another key, too; an error where none were."""
    extra: dict[str, Any] = {"top_k": 5}
    model, failures, held = build_lm("llama"), 0, []
    prefill = mmaccel.CausalLMWindow.prefill

    def fail(self: Any, entries: Any) -> None:
        nonlocal failures
        prefill(self, entries)
        held.append(len(caches[0]))
        if failures:
            failures -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(mmaccel.CausalLMWindow, "prefill", fail)
    monkeypatch.setattr(steps, "_SHORT", 0)  # a prompt that is not captured
    with mmaccel.attach(model, JACOBI, seed=3) as run:
        first = [sample(model, SHORT, **options) for options in ({"min_p": 0.1}, extra)]
        held.clear()
        failures = 1
        assert sample(model, SHORT, **extra).equal(first[1])
        assert held == [1, 0] and len(caches[0]) == 1  # the first key went
        failures = 1
        with pytest.raises(torch.OutOfMemoryError):
            sample(model, SHORT, **extra)
        assert len(caches[0]) == 0
        assert sample(model, SHORT, **extra).equal(first[1])
    assert captures(run.history) == [1, 1, 0, 1]


def test_no_memory_for_a_pass_drops_cached_graphs(
    caches: list[GraphCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_lm("llama")
    with mmaccel.attach(model, JACOBI, seed=3):
        first = sample(model, SHORT)
        sample(model, SHORT, top_k=5)
        assert len(caches[0]) == 2
        with monkeypatch.context() as changed:
            error = torch.OutOfMemoryError("CUDA out of memory")
            changed.setattr(Replay, "run_step", lambda *_: (_ for _ in ()).throw(error))
            with pytest.raises(torch.OutOfMemoryError):
                sample(model, SHORT)
        assert len(caches[0]) == 0 and sample(model, SHORT).equal(first)
