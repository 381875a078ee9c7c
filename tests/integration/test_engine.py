"""Engines: what is chosen and why, what is refused, and what happens when memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch

import mmaccel
from mmaccel import (
    Autoregressive,
    Filters,
    GroupedSpeculative,
    Jacobi,
    MissingBackendError,
    OptionError,
    Speculative,
    SpeculativeJacobi,
    UnsupportedModelError,
)  # fmt: skip
from mmaccel.pipelines import engine as engines
from mmaccel.pipelines import glm_image
from mmaccel.pipelines.engine import Engine
from mmaccel.pipelines.graph_steps import GraphSteps
from mmaccel.pipelines.text_to_image import TextToImage
from tests.checkpoints import FAMILIES, SIZES, captions
from tests.replay import Replay
from tests.tiny_lms import build_lm
from tests.toy import make_prompt

PROMPT = make_prompt([[1, 2], [3]])


class Counting(GraphSteps):
    """Captures without a GPU: a graph is a note of what it would run."""

    def __init__(self, failures: int = 0, **options: Any) -> None:
        super().__init__(torch.device("cuda"), **options)
        self.log: list[str] = []
        self.failures = failures

    def _run_aside(self, step: Callable[[], None]) -> None:
        self.log.append("aside")
        step()

    def _capture(self, step: Callable[[], None]) -> Callable[[], None]:
        if self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("CUDA out of memory.\n  Tried to allocate 2 GiB")
        self.log.append("capture")

        def replay() -> None:
            self.log.append("replay")
            step()

        return replay

    def _free(self) -> None:
        self.log.append("free")


def window(device: str = "cuda", **others: Any) -> Any:
    return SimpleNamespace(device=torch.device(device), steps=None, model=object(), **others)


def test_a_width_is_run_then_captured_then_replayed() -> None:
    steps, runs = Counting(), []
    usual = [steps.play(key, lambda: runs.append(1)) for key in (None, 8, 8, 8, 4, 8)]
    assert usual == [False, False, False, True, False, True]
    assert steps.log == ["aside", "capture", "replay", "replay", "aside", "replay"]
    assert len(runs) == 6 and steps.name == "graph" and not steps.reason
    steps.begin()  # another run's tensors
    steps.play(8, lambda: runs.append(1))
    assert steps.log[-1] == "aside"


def test_no_memory_for_a_graph() -> None:
    """The pass is made all the same, once, and so are all that follow."""
    steps, runs = Counting(failures=2), []
    usual = [steps.play(8, lambda: runs.append(1)) for _ in range(4)]
    assert len(runs) == 4 and usual == [False, False, True, True]
    assert steps.log == ["aside", "free", "free"] and steps.name == "eager"
    assert steps.reason == ("no memory for a graph (CUDA out of memory. Tried to allocate 2 GiB)")


def test_no_memory_where_a_graph_was_asked_for() -> None:
    steps = Counting(failures=2, gives_up=False)
    steps.play(8, lambda: None)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 2 GiB"):
        steps.play(8, lambda: None)
    assert steps.log == ["aside", "free", "free"]


def test_memory_that_is_only_cached_is_no_want_of_memory() -> None:
    steps, runs = Counting(failures=1), []
    usual = [steps.play(8, lambda: runs.append(1)) for _ in range(3)]
    assert steps.log == ["aside", "free", "capture", "replay", "replay"] and not steps.reason
    assert len(runs) == 3 and usual == [False, False, True] and steps.captures == 1


def test_a_graph_that_was_given_up_is_gone_before_its_pass_is_run() -> None:
    class Graph:
        pass

    class Holding(Counting):
        def _capture(self, step: Callable[[], None]) -> Callable[[], None]:
            graph = Graph()
            alive.append(ref(graph))
            return super()._capture(step)

        def _free(self) -> None:
            assert not any(graph() for graph in alive)
            super()._free()

    alive: list[Any] = []
    steps = Holding(failures=2)
    for _ in range(2):
        steps.play(8, lambda: None)
    assert len(alive) == 2 and steps.log == ["aside", "free", "free"]


def test_an_error_of_the_device_is_not_swallowed() -> None:
    class Broken(Counting):
        def _capture(self, step: Callable[[], None]) -> Callable[[], None]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    steps = Broken()
    steps.play(8, lambda: None)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        steps.play(8, lambda: None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "cuda"}, "engine: expected one of auto, eager, graph, received 'cuda'"),
        ({"kind": None}, "engine: expected one of"),
        ({"sync_every": 0}, "sync_every: expected an integer >= 1, received 0"),
        ({"sync_every": True}, "sync_every: expected an integer"),
        ({"sync_every": 2.0}, "sync_every: expected an integer"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Engine(**options)


def test_a_graph_needs_a_gpu(tiny_folder: Path) -> None:
    model = build_lm("llama")
    with pytest.raises(MissingBackendError, match="engine='graph': expected a model on a CUDA"):
        mmaccel.attach(model, Jacobi(), engine="graph")
    model.generate(torch.tensor([[1, 2]]), max_new_tokens=2)  # nothing was attached
    with pytest.raises(MissingBackendError, match="received one on cpu"):
        TextToImage.from_pretrained(tiny_folder, engine="graph")
    decoder = mmaccel.decoder(Jacobi(), engine="graph")
    with pytest.raises(MissingBackendError):
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, custom_generate=decoder)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("fast", OptionError, "MMACCEL_KERNELS: expected one of auto, torch, triton, received 'fa"),
        ("triton", MissingBackendError, "MMACCEL_KERNELS=triton: expected a device that Triton"),
    ],
)
def test_kernels_that_cannot_be_had_are_refused_before_work(
    value: str, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMACCEL_KERNELS", value)
    with pytest.raises(error, match=message):
        mmaccel.attach(build_lm("llama"), Jacobi())
    with pytest.raises(error, match=message):
        TextToImage.from_pretrained("scenes")


def test_a_graph_needs_a_policy_that_does_not_wait() -> None:
    with pytest.raises(OptionError, match="expected a policy whose passes can be captured"):
        Engine("graph").check("cuda", Speculative())
    for policy in (Autoregressive(), Jacobi(), SpeculativeJacobi(), GroupedSpeculative()):
        Engine("graph").check("cuda", policy)


@pytest.mark.parametrize("engine", ["auto", "eager"])
def test_statistics_say_what_ran_and_why(engine: str) -> None:
    model = build_lm("llama")
    with mmaccel.attach(model, Jacobi(window=4), engine=engine) as run:
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=8)
    assert run.stats is not None and run.stats.engine == "eager"
    reason = "the model on cpu; graphs need a CUDA device" if engine == "auto" else ""
    assert run.stats.engine_reason == reason
    assert run.stats.to_dict()["engine"] == "eager"
    assert (f"engine       eager: {reason}" in str(run.stats)) == bool(reason)


@pytest.mark.parametrize(
    ("obstacle", "arguments"),
    [
        ("the model on cpu", {"window": window("cpu")}),
        ("Speculative, whose passes wait", {"policy": Speculative()}),
        ("logits processors", {"filters": Filters(processor=lambda s, *_: s)}),
        (
            "a SimpleNamespace, which knows no captured steps",
            {"window": SimpleNamespace(device=torch.device("cuda"))},
        ),
        (
            "a model spread over 2 devices",
            {
                "window": SimpleNamespace(
                    device=torch.device("cuda"), steps=None,
                    model=SimpleNamespace(hf_device_map={"a": 0, "b": 1, "c": 0}),
                )
            },
        ),
        ("a forward that waits", {"tried": "a forward that waits"}),
    ],
)  # fmt: skip
def test_auto_says_why_not_and_graph_refuses(
    obstacle: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = arguments.pop("tried", None)
    monkeypatch.setattr(engines, "_trial", lambda *_: tried)
    call = {"window": window(), "policy": Jacobi(), "filters": Filters()} | arguments
    args = (call["window"], PROMPT, call["policy"], call["filters"])
    steps = Engine("auto", 3).steps(*args)
    assert steps.reason.startswith(obstacle) and (steps.name, steps.sync_every) == ("eager", 3)
    with pytest.raises((UnsupportedModelError, MissingBackendError, OptionError)):
        Engine("graph").steps(*args)
    assert Engine("eager").steps(*args).reason == ""


def test_a_plain_call_on_a_gpu_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_trial", lambda *_: None)
    for kind, gives_up in (("auto", True), ("graph", False)):
        steps = Engine(kind, 2).steps(window(), PROMPT, Jacobi(), Filters())
        assert isinstance(steps, GraphSteps) and (steps.sync_every, steps.gives_up) == (2, gives_up)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "llamagen-c2i"])  # t2i is it too
def test_every_picture_family_can_be_captured(
    family: str, built: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replayed pass makes the tokens of a run pass; nothing in it reads back."""
    if family == "glm-image":
        monkeypatch.setattr(glm_image.GlmImagePictures, "render", lambda self, tokens, *_: [None])
    pipe = TextToImage.from_pretrained(built(family), size=SIZES.get(family))
    texts, policy = captions(family)[:1], Jacobi(window=4)
    plain = pipe(texts, policy=policy, seed=5)
    steps = Replay()
    pipe.engine = SimpleNamespace(  # type: ignore[assignment]
        prepare=lambda model, *_: setattr(model, "steps", steps)
    )
    captured = pipe(texts, policy=policy, seed=5)
    assert steps.replayed > 0 and captured.stats.engine == "graph"
    assert captured.tokens.equal(plain.tokens)


@pytest.mark.parametrize("attention", ["twin", "auto"])
def test_statistics_say_which_attention_ran(attention: Any) -> None:
    model = mmaccel.CausalLMWindow(build_lm("llama"), attention=attention)
    noise = mmaccel.Noise.from_seed(0, 2)
    made = Jacobi(window=4).sample(model, PROMPT, 4, filters=Filters(), noise=noise)
    ran = "the model's own: the model is on cpu" if attention == "auto" else "window_attention"
    assert made.stats.attention == ran
