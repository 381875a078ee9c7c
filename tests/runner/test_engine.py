"""Engines: what is chosen and why, what is refused, and what happens when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch

import mmaccel
from mmaccel import (
    Jacobi,
    MissingBackendError,
    OptionError,
    SamplingParams,
    Speculative,
    UnsupportedModelError,
)
from mmaccel.contracts import Pass, RunSetup, TokenModel
from mmaccel.pipelines.hosts.runner.cuda_graphs import CudaGraphRunner
from mmaccel.pipelines.hosts.runner.engine import Engine
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import make_prompt

PROMPT = make_prompt([[1, 2], [3]])


class Counting(CudaGraphRunner):
    """Captures without a GPU: a graph is a closure over its step."""

    def __init__(self, failures: int = 0, **options: Any) -> None:
        super().__init__(torch.device("cuda"), **options)
        self.log: list[str] = []
        self.failures = failures

    def _warm_up(self, step: Callable[[], None]) -> None:
        self.log.append("warm up")
        step()

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        if self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("CUDA out of memory.\n  Tried to allocate 2 GiB")
        self.log.append("capture")

        def replay() -> None:
            self.log.append("replay")
            step()

        return replay

    def _empty_allocator(self) -> None:
        self.log.append("free")

    @contextmanager
    def _refuse_sync(self) -> Iterator[None]:
        self.log.append("trial")
        yield


class Placed(TokenModel):
    """A model on a device, of which nothing is computed."""

    offers = TokenModel.offers | {"captured steps"}
    own_lack = ""
    device = torch.device("cuda")

    def __init__(self, **facts: Any) -> None:
        vars(self).update({"model": object()} | facts)

    def lack(self, word: str, part: Any = None) -> str:
        return self.own_lack or super().lack(word, part)

    def reserve(self, rows: int, positions: int) -> None: ...

    def forward(self, entries: Pass) -> torch.Tensor:
        raise AssertionError


class Captureless(Placed):
    """A model whose buffers end with a run."""

    offers = TokenModel.offers


def window(device: str = "cuda", **others: Any) -> Any:
    return Placed(device=torch.device(device), **others)


def test_a_width_is_run_then_captured_then_replayed() -> None:
    runner, runs = Counting(), []
    usual = [runner.run_step(key, lambda: runs.append(1)) for key in (None, 8, 8, 8, 4, 8)]
    assert usual == [False, False, False, True, False, True]
    tail = ["trial", "warm up", "replay"]  # a run without a key is tried anew
    assert runner.log == ["trial", "warm up", "capture", "replay", "replay", *tail]
    assert len(runs) == 6 and runner.name == "cuda graphs" and not runner.reason
    runner.load(None, {})  # another run starts
    runner.run_step(8, lambda: runs.append(1))
    assert runner.log[-1] == "warm up"


def test_no_memory_for_a_graph() -> None:
    """The step runs eagerly, once, and so do all later ones; or the error is raised."""
    runner, runs = Counting(failures=2), []
    usual = [runner.run_step(8, lambda: runs.append(1)) for _ in range(4)]
    assert len(runs) == 4 and usual == [False, False, True, True]
    assert runner.log == ["trial", "warm up", "free", "free"] and runner.name == "eager"
    assert runner.reason == ("no memory for a graph (CUDA out of memory. Tried to allocate 2 GiB)")
    strict = Counting(failures=2, falls_back=False)
    strict.run_step(8, lambda: None)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 2 GiB"):
        strict.run_step(8, lambda: None)
    assert strict.log == ["trial", "warm up", "free", "free"]


def test_a_failed_graph_is_deleted_before_its_step_runs() -> None:
    class Graph:
        pass

    class Holding(Counting):
        def capture(self, step: Callable[[], None]) -> Callable[[], None]:
            graph = Graph()
            alive.append(ref(graph))
            return super().capture(step)

        def _empty_allocator(self) -> None:
            assert not any(graph() for graph in alive)
            super()._empty_allocator()

    alive: list[Any] = []
    runner = Holding(failures=2)
    for _ in range(2):
        runner.run_step(8, lambda: None)
    assert len(alive) == 2 and runner.log == ["trial", "warm up", "free", "free"]


def test_an_error_of_the_device_is_not_swallowed() -> None:
    class Broken(Counting):
        def capture(self, step: Callable[[], None]) -> Callable[[], None]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    runner = Broken()
    runner.run_step(8, lambda: None)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        runner.run_step(8, lambda: None)


def test_a_refused_engine_leaves_the_model_alone() -> None:
    model, ids = build_lm("llama"), torch.tensor([[1, 2]])
    with pytest.raises(MissingBackendError):
        mmaccel.attach(model, Jacobi(), cuda_graphs=True)
    model.generate(ids, max_new_tokens=2)  # nothing was attached
    decoder = mmaccel.decoder(Jacobi(), cuda_graphs=True)
    with pytest.raises(MissingBackendError):
        model.generate(ids, max_new_tokens=2, custom_generate=decoder)


@pytest.mark.parametrize("cuda_graphs", ["auto", False])
def test_statistics_say_what_ran_and_why(cuda_graphs: Any) -> None:
    model = build_lm("llama")
    with mmaccel.attach(model, Jacobi(window=4), cuda_graphs=cuda_graphs) as run:
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=8)
    assert run.stats is not None and run.stats.runner == "eager"
    reason = "the model on cpu; CUDA graphs need a CUDA device" if cuda_graphs == "auto" else ""
    assert run.stats.runner_reason == reason
    assert run.stats.to_dict()["runner"] == "eager"
    assert (f"runner       eager: {reason}" in str(run.stats)) == bool(reason)


@pytest.mark.parametrize(
    ("obstacle", "arguments"),
    [
        ("the model on cpu", {"window": window("cpu")}),
        ("Speculative, whose passes synchronise", {"policy": Speculative()}),
        ("logits processors", {"params": SamplingParams(processor=lambda s, *_: s)}),
        (
            "it takes no step runner",
            {"window": Captureless()},
        ),
        (
            "a model spread over 2 devices",
            {"window": window(model=SimpleNamespace(hf_device_map={"a": 0, "b": 1, "c": 0}))},
        ),
        (
            "outputs of every step",
            {"window": window(setup=RunSetup(recorder=SimpleNamespace(is_active=True)))},
        ),
        (
            "what the model says of itself",
            {"window": window(own_lack="what the model says of itself")},
        ),
    ],
)
def test_auto_says_why_not_and_true_refuses(obstacle: str, arguments: dict[str, Any]) -> None:
    call = {"window": window(), "policy": Jacobi(), "params": SamplingParams()} | arguments
    args = (call["window"], PROMPT, call["policy"], call["params"])
    runner = Engine("auto", 3).runner(*args)
    assert runner.reason.startswith(obstacle) and (runner.name, runner.sync_every) == ("eager", 3)
    with pytest.raises((UnsupportedModelError, MissingBackendError, OptionError)):
        Engine(True).runner(*args)
    assert Engine(False).runner(*args).reason == ""


def test_a_plain_call_on_a_gpu_is_captured() -> None:
    for kind, falls_back in (("auto", True), (True, False)):
        engine = Engine(kind, 2)
        runner = engine.runner(window(), PROMPT, Jacobi(), SamplingParams())
        assert isinstance(runner, CudaGraphRunner) and runner._cache is engine.cache
        assert (runner.sync_every, runner.falls_back) == (2, falls_back)


def test_each_call_processes_prompts_as_its_engine_or_itself_says() -> None:
    """One model, whose calls come one after another."""
    model = mmaccel.CausalLMWindow(build_lm("llama"))
    seen = []
    for size, own in ((4, None), (4, 2), (None, 3), (None, None)):
        engine = Engine(prefill_chunk_size=size)
        engine.prepare(model, PROMPT, Jacobi(), SamplingParams(), prefill_chunk_size=own)
        seen.append(model.setup.prefill_chunk_size)
    assert seen == [4, 2, 3, None]


@pytest.mark.parametrize("attention", ["kernel", "auto"])
def test_statistics_say_which_attention_ran(attention: Any) -> None:
    model = mmaccel.CausalLMWindow(build_lm("llama"), attention=attention)
    noise = mmaccel.Noise.from_seed(0, 2)
    made = Jacobi(window=4).sample(model, PROMPT, 4, params=SamplingParams(), noise=noise)
    ran = "the model's own: the model is on cpu" if attention == "auto" else "window_attention"
    assert made.stats.attention == ran


def test_a_graph_has_a_workspace_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace of cuBLAS that a capture finds is in nobody's pool, and none is left there."""
    log: list[str] = []

    class Graph:
        def capture_begin(self, *given: Any, **options: Any) -> None:
            log.append("begin")

        def capture_end(self) -> None:
            log.append("end")

        def pool(self) -> tuple[int, int]:
            return 0, 1

        def replay(self) -> None:
            log.append("replay")

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        yield

    clear = "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch._C, clear, lambda: log.append("clear"), raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", on)
    runner = CudaGraphRunner(torch.device("cuda"))
    runner._entry.stream = SimpleNamespace()  # type: ignore[assignment]
    runner.capture(lambda: log.append("step"))()
    assert log == ["clear", "begin", "step", "end", "clear", "replay"]
