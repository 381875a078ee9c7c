"""Compiled passes: the fused decoder's hidden states, where a trial found them faster."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import CausalLMWindow, Jacobi, UnsupportedModelError
from mmaccel.commands.doctor import list_devices
from mmaccel.contracts import Pass
from mmaccel.errors import MissingBackendError
from mmaccel.pipelines.hosts.runner import compiled_passes, onednn
from mmaccel.pipelines.hosts.runner.compiled_passes import find_obstacle
from mmaccel.pipelines.hosts.runner.engine import Engine
from mmaccel.samplers.compare_logits import compare_logits
from mmaccel.samplers.tuner import Tuner
from tests.fixtures.fused_lms import build_decoder, lay_out_all, note_products

ONE, SEVERAL = (1, False), (1, True)  # kinds of passes of one row
needs_compiler = pytest.mark.skipif(bool(find_obstacle()), reason=find_obstacle())


def open_windows(name: str = "llama") -> tuple[CausalLMWindow, CausalLMWindow]:
    """The same model by the fused decoder, as it is and compiled."""
    model = build_decoder(name)
    return CausalLMWindow(model, fused=True), CausalLMWindow(model, fused=True, compile=True)


def run_passes(
    window: CausalLMWindow, widths: tuple[int, ...] = (4, 1, 3, 4), rows: int = 1, first: int = 3
) -> list[Tensor]:
    """Logits of passes of these widths behind a prompt of `first` tokens."""
    ids = torch.randint(40, (rows, 150), generator=torch.Generator().manual_seed(1))
    window.reserve(rows, first + 30)
    window.prefill(Pass(ids[:, :first], torch.zeros(rows, dtype=torch.int64)))
    made, at = [], torch.full((rows,), first)
    for width in widths:
        made.append(window.forward(Pass(ids[:, int(at[0]) : int(at[0]) + width], at)))
        at = at + width
    return made


def passes_of(window: CausalLMWindow) -> compiled_passes.CompiledPasses:
    assert window.forwards.decoder is not None
    return window.forwards.decoder.compiled


@pytest.fixture
def always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_passes, "_GAIN", 0.0)


Made = list[Callable[..., Tensor]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Stands for torch.compile: collects functions that do what they were made of."""
    found: Made = []

    def compile(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        found.append(lambda *given: plain(*given))
        return found[-1]

    monkeypatch.setattr(compiled_passes, "_compile", compile)
    return found


@needs_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("always_faster")
@pytest.mark.parametrize("name", ["llama", "gemma2, capped", "opt, norms after and projections"])
def test_compiled_passes_give_the_same_logits(name: str) -> None:
    plain, compiled = open_windows(name)
    for expected, received in zip(run_passes(plain), run_passes(compiled)):
        assert compare_logits(expected, received).largest < 1e-5
    assert (plain.route.name, compiled.route.name) == ("fused", "compiled")
    assert passes_of(compiled).reasons == {}
    assert set(passes_of(compiled).gains) == {(1, 4), (1, 1)}
    with torch.no_grad():  # new weights, in the same storage
        for parameter in plain.model.parameters():
            parameter.mul_(1.1)
    for expected, received in zip(run_passes(plain), run_passes(compiled)):
        assert compare_logits(expected, received).largest < 1e-5


@needs_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("always_faster")
def test_compiled_passes_multiply_in_onednns_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that is faster; not from weights that changed since."""
    lay_out_all(monkeypatch)
    plain, compiled = open_windows()
    rows = note_products(monkeypatch)
    for factor in (1, 1.1):
        with torch.no_grad():
            for parameter in plain.model.parameters():
                parameter.mul_(factor)
        expected = run_passes(plain)
        run_passes(compiled)  # compiles
        rows.clear()
        received = run_passes(compiled)
        assert rows.count(1) == 4 * 2 + 1 and rows.count(4) == 2 * (4 * 2 + 1)  # layers and head
        for pair in zip(expected, received):
            assert compare_logits(*pair).largest < 1e-5
    assert compiled.route.name == "compiled" and passes_of(compiled).reasons == {}


@pytest.mark.usefixtures("made")
def test_products_are_tried_before_a_pass_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled for one token holds the way that is faster for it."""
    monkeypatch.setattr(onednn, "LEAST_BYTES", 0)
    for window, tried in zip(open_windows(), (0, 1)):
        run_passes(window, (1,))
        decoder = window.forwards.decoder
        assert decoder is not None
        assert len([key for key in decoder.products.faster if key[1] == 1]) == tried


@needs_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("always_faster")
def test_numbers_of_tokens_and_keys_may_change_without_compiling_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setattr(compiled_passes, "_keep", lambda compiled: compiled)
    model = build_decoder("llama", max_position_embeddings=256)
    window = CausalLMWindow(model, fused=True, compile=True)
    run_passes(window, (4, 3, 5), rows=2)
    before = counters["stats"]["unique_graphs"]
    run_passes(window, (2, 4, 6, 3), rows=2, first=12)
    run_passes(window, (7, 8, 9), rows=2, first=50)  # keys are read in steps of 64
    run_passes(window, (7, 8), rows=2, first=64)
    run_passes(window, (5, 5, 5, 5), rows=2, first=110)
    assert counters["stats"]["unique_graphs"] == before > 0
    assert window.route.name == "compiled"


@needs_compiler
def test_what_was_not_compiled_for_runs_as_it_is() -> None:
    from torch._dynamo.utils import counters

    call = compiled_passes._keep(compiled_passes._compile(lambda states: states * 2 + 1))
    assert call(torch.ones(3)).tolist() == [3, 3, 3]  # before anything is compiled
    compiled = compiled_passes._compile(lambda states: states * 2 + 1)
    compiled(torch.ones(3))
    before = counters["stats"]["unique_graphs"]
    assert compiled_passes._keep(compiled)(torch.ones(4)).tolist() == [3, 3, 3, 3]
    assert counters["stats"]["unique_graphs"] == before


@pytest.mark.usefixtures("always_faster")
def test_one_function_serves_a_kind_and_a_trial_each_shape(made: Made) -> None:
    _, window = open_windows()
    run_passes(window, (4, 1, 2, 3, 1, 5))
    assert len(made) == 2  # one token, and several
    assert set(passes_of(window).gains) == {(1, 1), (1, 2), (1, 4), (1, 8)}  # up to a power of 2
    gains = dict(passes_of(window).gains)
    run_passes(window, (4, 1, 2, 3, 1, 6))
    assert passes_of(window).gains == gains and len(made) == 2


def test_a_shape_that_is_not_faster_compiled_runs_as_it_is(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = iter([0.98, 2.0, 0.5])  # of passes of 2, 1 and 4 tokens
    monkeypatch.setattr(Tuner, "add", lambda *_: None)
    monkeypatch.setattr(Tuner, "cost", lambda *_: next(costs))
    _, window = open_windows()
    run_passes(window, (2, 1))
    assert window.route.name == "fused"
    run_passes(window, (2, 4))
    assert window.route.name == "compiled"


def test_auto_waits_until_passes_took_as_long_as_compiling_may(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_decoder("llama")
    window = CausalLMWindow(model, fused="auto", compile="auto")
    run_passes(window)
    assert not made and window.route.name == "fused"
    passes_of(window).plain_passes[1, 4].add(1, 25.0)
    monkeypatch.setattr(compiled_passes, "find_obstacle", lambda: "no compiler")
    run_passes(window)
    assert not made
    monkeypatch.setattr(compiled_passes, "find_obstacle", lambda: "")
    run_passes(window, (4, 1, 2))
    assert len(made) == 1  # the kind of one token has not taken long
    assert set(passes_of(window).gains) == {(1, 4)}  # nor has the shape (1, 2)


def test_passes_of_a_shape_run_in_one_way_through_a_run(made: Made) -> None:
    model = build_decoder("llama")
    window = CausalLMWindow(model, fused=True, compile="auto")
    run_passes(window, (4,))
    passes_of(window).plain_passes[1, 4].add(1, 25.0)
    window.forward(Pass(torch.zeros(1, 4, dtype=torch.int64), torch.full((1,), 8)))
    assert not made  # the run began before it was time
    run_passes(window, (4,))
    assert len(made) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda states: states + states.abs().mean(), "standard deviations off"),
        (lambda states: states * float("nan"), "inf standard deviations off"),
        (lambda states: states.no_such_thing, "AttributeError"),
    ],
    ids=["shifted", "nan", "error"],
)
def test_what_is_not_the_same_is_not_used(
    wrong: Callable[[Tensor], Tensor], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        compiled_passes, "_compile", lambda plain: lambda *given: wrong(plain(*given))
    )
    plain, window = open_windows()
    expected = run_passes(plain)
    with pytest.raises(UnsupportedModelError, match="compile=True: expected layers"):
        run_passes(window)
    window.setup.compile = "auto"
    for one, other in zip(expected, run_passes(window)):
        assert torch.equal(one, other)
    assert window.route.name == "fused"
    assert message in passes_of(window).reasons[SEVERAL] and ONE not in passes_of(window).reasons


@pytest.mark.usefixtures("always_faster")
def test_prompts_and_some_of_the_rows_run_as_they_are(made: Made) -> None:
    window = CausalLMWindow(build_decoder("llama"), stride=1, fused=True, compile=True)
    window.reserve(2, 20)
    ids = torch.randint(40, (2, 20), generator=torch.Generator().manual_seed(1))
    window.forward(Pass(ids[:, :5], torch.zeros(2, dtype=torch.int64)))
    window.forward(Pass(ids[:, 5:7], torch.full((2,), 5)))  # makes room for the rest
    assert not made
    layout: Any = window.run_caches().layout
    with layout.select(torch.tensor([1])):
        window.forward(Pass(ids[1:, 7:9], torch.full((1,), 7)))
    assert not made and window.route.name == "fused"
    window.forward(Pass(ids[:, 7:9], torch.full((2,), 7)))
    assert len(made) == 1


@pytest.fixture
def looked_for_anew() -> Iterator[None]:
    find_obstacle.cache_clear()
    yield
    find_obstacle.cache_clear()


def said_of_the_compiler() -> str:
    found = next(finding for finding in list_devices() if finding.what == "compiler")
    assert found.state == "no"
    return found.detail


@pytest.mark.usefixtures("looked_for_anew")
def test_the_compiler_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder

    def find() -> str:
        raise RuntimeError("No working C++ compiler found in config.cpp.cxx")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", find)
    assert "finds no C++ compiler" in find_obstacle()
    assert "finds no C++ compiler" in said_of_the_compiler()


@pytest.mark.usefixtures("looked_for_anew")
@pytest.mark.parametrize("folder", ["cache", "."])
def test_a_cache_that_cannot_be_written_is_not_blamed_on_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """Its folder cannot be made, or no file in it."""

    def refuse(**_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "cache")

    if folder == "cache":
        (tmp_path / folder).write_text("a file")
    else:
        monkeypatch.setattr(compiled_passes, "TemporaryFile", refuse)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / folder))
    said = said_of_the_compiler()
    assert "torch cannot write its compile cache" in said and "finds no" not in said
    assert "cache'); set TORCHINDUCTOR_CACHE_DIR" in said
    with pytest.raises(MissingBackendError, match="a folder that can be written, or set comp"):
        Engine(compile=True).check("cpu")


@needs_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("always_faster")
def test_tokens_of_compiled_passes_are_those_of_the_fused_decoder_and_of_the_plain_loop() -> None:
    model, ids = build_decoder("llama"), torch.tensor([[5, 9, 2], [7, 3, 8]])
    made, passes = [], []
    for policy, compile in (
        (Jacobi(6), False),
        (Jacobi(6), True),
        (mmaccel.Autoregressive(), True),
    ):
        with mmaccel.attach(model, policy, seed=[1, 2], strict=True, compile=compile) as run:
            made.append(model.generate(ids, do_sample=True, max_new_tokens=24))
            assert run.stats is not None
            assert run.stats.route == ("compiled" if compile else "fused")
            passes.append(run.stats.passes)
            run.detach(keep_packed=True)
    assert torch.equal(made[0], made[1]) and torch.equal(made[1], made[2])
    assert passes[0] == passes[1] < passes[2]
