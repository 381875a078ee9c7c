"""What an attached policy and a decoder keep between calls, and when they let it go."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmaccel
from mmaccel import GroupedSpeculative, Jacobi, NumericsError
from mmaccel.pipelines.engine import Engine
from mmaccel.results import Stats
from tests.integration.test_engine import Counting
from tests.replay import Replay
from tests.tiny_lms import build_lm, left_padded

SHORT = [[5, 9, 11, 2], [7]]
LONG = [[4], [6, 6, 6, 30, 31, 9, 8]]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines record passes as on a GPU."""
    monkeypatch.setattr(Engine, "steps", lambda self, *_: Replay(self.sync_every, self.shelf))


def captures(history: list[Stats]) -> list[int]:
    assert all(stats.engine == "graph" and not stats.fallbacks for stats in history)
    return [stats.captures for stats in history]


def sample(model: Any, rows: list[list[int]], **options: Any) -> Any:
    return model.generate(
        **left_padded(rows), **{"max_new_tokens": 20, "do_sample": True} | options
    )


def test_an_attached_policy_keeps_its_records(
    recorded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other prompts, seeds and lengths are of one kind; a filter's value makes another."""
    calls: list[tuple[list[list[int]], dict[str, Any]]] = [
        (SHORT, {}), (LONG, {}), (SHORT, {"max_new_tokens": 13}), (LONG, {"top_k": 5}),
        (LONG, {"eos_token_id": [9, 17]}), (SHORT, {"eos_token_id": [12, 31]}),
    ]  # fmt: skip
    model, made = build_lm("llama"), {}
    for kind in ("graph", "eager"):
        with monkeypatch.context() as changed:
            if kind == "eager":
                changed.setattr(Engine, "steps", lambda *_: None)
            with mmaccel.attach(model, Jacobi(window=4), strict=True) as run:
                torch.manual_seed(5)
                made[kind] = [sample(model, rows, **extra) for rows, extra in calls]
        if kind == "graph":
            assert captures(run.history) == [1, 0, 0, 1, 1, 0]
    assert all(mine.equal(own) for mine, own in zip(made["graph"], made["eager"], strict=True))


def test_detaching_frees_what_is_kept(recorded: None) -> None:
    model = build_lm("llama")
    with mmaccel.attach(model, Jacobi(window=4)) as run:
        for _ in range(2):
            sample(model, SHORT)
        shelf = run._service.engine.shelf
        assert len(shelf) == 1
        other = mmaccel.attach(build_lm("llama"), Jacobi(window=4))
        assert other._service.engine.shelf is not shelf
    assert captures(run.history) == [1, 0] and len(shelf) == 0
    with mmaccel.attach(model, Jacobi(window=4)) as run:
        sample(model, SHORT)
    assert captures(run.history) == [1]


def test_a_decoder_keeps_its_records_until_its_engine_is_closed(recorded: None) -> None:
    model, decoder = build_lm("llama"), mmaccel.decoder(GroupedSpeculative(window=4), strict=True)
    for rows in (SHORT, LONG):
        sample(model, rows, custom_generate=decoder)
    decoder.engine.close()
    sample(model, SHORT, custom_generate=decoder)
    assert captures(decoder.history) == [1, 0, 1]
    assert mmaccel.decoder(Jacobi()).engine.shelf is not decoder.engine.shelf


def test_scores_that_are_no_law_leave_nothing_behind(recorded: None) -> None:
    """NaN in a kept cache would come through a mask."""
    model = build_lm("llama")
    with mmaccel.attach(model, Jacobi(window=4), seed=3) as run:
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


def test_what_is_kept_goes_before_a_graph_is_given_up(recorded: None) -> None:
    """No memory: kept runs are freed, and the capture is tried once more."""
    engine, runs = Engine(), []
    for failures, log in (
        (1, ["aside", "free", "capture", "replay"]),
        (2, ["aside", "free", "free"]),
    ):
        keep_one(engine)
        steps = Counting(failures=failures, shelf=engine.shelf)
        steps.play(8, lambda: runs.append(1))
        assert len(engine.shelf) == 1
        steps.play(8, lambda: runs.append(1))
        assert len(engine.shelf) == 0 and steps.log == log
        assert (steps.name, steps.captures) == (("graph", 1) if failures == 1 else ("eager", 0))
    assert len(runs) == 4


def keep_one(engine: Engine) -> None:
    decoder = mmaccel.decoder(Jacobi(window=4))
    decoder.engine = engine
    sample(build_lm("llama"), SHORT, custom_generate=decoder)
    assert len(engine.shelf) == 1


@pytest.mark.parametrize("extra", [{}, {"top_k": 5}], ids=["of its kind", "of another"])
def test_no_memory_for_a_prompt_frees_what_is_kept(
    extra: dict[str, Any], recorded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once more where kept runs were freed; an error where there were none."""
    model, failures, held = build_lm("llama"), 0, []
    feed = mmaccel.CausalLMWindow.feed

    def fail(self: Any, tokens: Any, start: Any) -> None:
        nonlocal failures
        feed(self, tokens, start)
        held.append(len(shelf))
        if failures:
            failures -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(mmaccel.CausalLMWindow, "feed", fail)
    with mmaccel.attach(model, Jacobi(window=4), seed=3) as run:
        shelf = run._service.engine.shelf
        first = [sample(model, SHORT, **options) for options in ({"min_p": 0.1}, extra)]
        held.clear()
        failures = 1
        assert sample(model, SHORT, **extra).equal(first[1])
        assert held == [1, 0] and len(shelf) == 1  # the first kind went
        failures = 1
        with pytest.raises(torch.OutOfMemoryError):
            sample(model, SHORT, **extra)
        assert len(shelf) == 0
        assert sample(model, SHORT, **extra).equal(first[1])
    assert captures(run.history) == [1, 1, 0, 1]


def test_no_memory_for_a_pass_frees_what_is_kept(
    recorded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_lm("llama")
    with mmaccel.attach(model, Jacobi(window=4), seed=3) as run:
        first = sample(model, SHORT)
        sample(model, SHORT, top_k=5)
        shelf = run._service.engine.shelf
        assert len(shelf) == 2
        with monkeypatch.context() as changed:
            error = torch.OutOfMemoryError("CUDA out of memory")
            changed.setattr(Replay, "play", lambda *_: (_ for _ in ()).throw(error))
            with pytest.raises(torch.OutOfMemoryError):
                sample(model, SHORT)
        assert len(shelf) == 0 and sample(model, SHORT).equal(first)
