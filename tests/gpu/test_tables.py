"""Timings and tables of the check on GPUs: arguments, comparisons, what is worst."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import timing
from benchmarks.gpu.attention import HEADS as MODELS
from benchmarks.gpu.attention import (
    Heads,
    attention_parts,
    find_figures,
    time_attention,
    time_ragged,
)
from benchmarks.gpu.nodes import record_pass, record_step
from benchmarks.gpu.timing import TIMINGS, Timing
from benchmarks.report import FIGURES, fill_tables
from mmaccel import CausalLMWindow, Jacobi, Noise, SamplingParams
from mmaccel.kernels.norm import Norm
from mmaccel.kernels.window_attention import window_attention
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import make_prompt

EMPTY = torch.empty, torch.empty_like, Tensor.new_empty
CPU, META = torch.device("cpu"), torch.device("meta")
with torch.device("meta"):  # torch notes at the first use which functions make tensors: the real
    torch.empty(0)  # ones, not those that conftest puts in their place


READ_PARTS = ("compact", "coarse_sweep", "window_inputs", "accept_prefix")  # of an operand


def size_of(value: Any) -> int:
    """Bytes of all tensors in a value."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Norm):
        return size_of((value.weight, value.bias))
    return sum(map(size_of, value)) if isinstance(value, tuple) else 0


@pytest.mark.parametrize(
    ("kernel", "timing"),
    [pytest.param(k, t, id=f"{k}: {t.name}") for k, rows in TIMINGS.items() for t in rows],
)
def test_timings_are_calls_that_both_versions_take(kernel: str, timing: Timing) -> None:
    """Shapes fit, Triton refuses nothing, and bytes are those of operands and results."""
    pytest.importorskip("triton")
    args = timing.prepare(META)
    made = getattr(import_module(f"mmaccel.kernels.{kernel}"), timing.function)(
        *args, **timing.options
    )
    triton_module = import_module(f"mmaccel.kernels.{kernel}_triton")
    assert getattr(triton_module, f"refuse_{timing.function}")(*args, **timing.options) is None
    moved = size_of(args) + size_of(made)
    if kernel not in READ_PARTS:
        assert 0.97 * moved < timing.n_bytes <= moved


HEADS = Heads(4, 2, 16)
PRESET = {"ours": 1.0, "sdpa": 2.0, "flex": 0.8}


class Timer:
    """Runs a call once, keeps what it made, and reads preset milliseconds in turn."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []

    def __call__(self, call: Callable[[], Any], *others: Callable[[], Any]) -> float:
        self.made.append(call())
        return list(PRESET.values())[(len(self.made) - 1) % 3]


@pytest.fixture
def plain_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.mark.usefixtures("plain_compiler")
@pytest.mark.filterwarnings("ignore")
def test_all_attentions_compute_the_same() -> None:
    timer = Timer()
    made = time_attention(
        "tiny", HEADS, CPU, ours=window_attention, timer=timer, gb_per_s=0.01, widths=(1, 5),
        rooms=(64, 100), copies=2,
    )  # fmt: skip
    assert len(timer.made) == 3 * 4
    for first in range(0, 12, 3):
        ours, sdpa, flex = (out.float() for out in timer.made[first : first + 3])
        # bfloat16 results of values of size 1: two roundings of 2^-8
        torch.testing.assert_close(sdpa, ours, rtol=0.02, atol=0.01)
        torch.testing.assert_close(flex, ours, rtol=0.02, atol=0.01)
    row = made["attention"][0]
    assert (row["ours_ms"], row["sdpa_ms"], row["flex_ms"], row["loses"]) == (1.0, 2.0, 0.8, True)
    assert row["bytes"] == 2 * (2 * 2 * 64 * 16) * 2
    assert row["share_of_copy"] == pytest.approx(row["bytes"] / 1e-3 / 0.01e9)
    assert made["figures"] == {
        "window_attention_over_sdpa": 2.0,
        "window_attention_over_flex": 0.8,
    }


@pytest.mark.filterwarnings("ignore")
def test_an_attention_that_does_not_compile_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function: Any, **_: Any) -> Any:
        raise ValueError("no such | tile")

    monkeypatch.setattr(torch, "compile", refuse)
    options: dict[str, Any] = dict(
        ours=window_attention, timer=lambda *calls: 1.5, copies=1, gb_per_s=1.0, widths=(2,)
    )
    made = time_attention("tiny", HEADS, CPU, rooms=(8,), **options)
    (row,) = made["attention"]
    assert row["flex_ms"] is None and row["flex_reason"] == "ValueError: no such | tile"
    assert "window_attention_over_flex" not in made["figures"] and not row["loses"]
    ticks = iter(range(0, 1000, 7))
    made = time_attention(
        "tiny", HEADS, CPU, rooms=(8, 9, 10), compiling=10, clock=lambda: next(ticks), **options
    )
    reasons = [row["flex_reason"].split(":")[0] for row in made["attention"]]
    assert reasons == ["ValueError", "ValueError", "seconds for compiling were used up"]

    def lose(function: Any, **_: Any) -> Any:
        raise RuntimeError("CUDA error: launch failure")

    monkeypatch.setattr(torch, "compile", lose)
    with pytest.raises(RuntimeError, match="launch"):
        time_attention("tiny", HEADS, CPU, rooms=(8,), **options)


def test_rows_of_several_lengths() -> None:
    """Times of every form of lengths, with and without splits by lengths."""
    calls: list[tuple[list[int], bool]] = []

    def ours(q: Tensor, k: Tensor, v: Tensor, start: Tensor, scale: float, ragged: bool) -> None:
        calls.append(((start + q.shape[2]).tolist(), ragged))

    def timer(*given: Any) -> float:
        given[0]()
        return 1.0 if calls[-1][1] else 3.0

    options: dict[str, Any] = {"rows": 4, "widths": (2,), "rooms": (64,), "heads": HEADS}
    made = time_ragged(CPU, ours=ours, timer=timer, **options)
    assert [lengths for lengths, ragged in calls if ragged] == [
        [64, 4, 4, 4],
        [16, 32, 48, 64],
        [64] * 4,
    ]
    assert [ragged for _, ragged in calls] == [False, True] * 3
    assert made["figures"] == {"window_attention_ragged_gain": 3.0}


def test_figures_of_attention_are_the_worst() -> None:
    def row(n_bytes: int, share: float, sdpa: float, flex: float | None) -> dict[str, Any]:
        times = {"ours_ms": 2.0, "sdpa_ms": sdpa, "flex_ms": flex}
        return times | {"bytes": n_bytes, "share_of_copy": share}

    rows = [
        row(10**6, 0.1, 6.0, None),
        row(2 * 10**8, 0.7, 3.0, 5.0),
        row(2 * 10**8, 0.9, 4.0, 4.0),
    ]
    assert find_figures(rows) == {
        "window_attention_share_of_copy": 0.7,  # of large caches alone
        "window_attention_over_sdpa": 1.5,
        "window_attention_over_flex": 2.0,
    }
    parts = attention_parts(CPU, tiny=True)
    assert len(parts) == len({part.name for part in parts}) == 5
    assert MODELS["Emu3-8B"] == (32, 8, 128)


def test_the_slowest_row_fills_a_kernel_s_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands are there as often as a cache needs; without a GPU only torch is timed."""
    pytest.importorskip("triton")
    ms, n_calls = iter([9.0, 0.2, 9.0, 0.3, 9.0, 0.1]), []

    def prepare(device: torch.device) -> tuple[Any, ...]:
        return ()

    def time_calls(*calls: Any) -> float:
        n_calls.append(len(calls))
        return next(ms)

    sizes = (10**6, 10**8, 10**9)
    rows = [Timing("sample_frozen", str(n), prepare, n, "sample_64x131k_ms") for n in sizes]
    monkeypatch.setattr(timing, "copy_bandwidth", lambda *_: 100.0)
    monkeypatch.setattr(timing, "timer_of", lambda device: time_calls)
    monkeypatch.setitem(TIMINGS, "sample", rows)
    made = timing.time_kernel("sample", torch.device("cuda"))
    assert made["figures"] == {"sample_64x131k_ms": 0.3}
    assert made["timings"][0]["gb_per_s"] == pytest.approx(5.0)
    assert made["timings"][0]["share_of_copy"] == pytest.approx(0.05)
    assert n_calls == [64, 64, 2, 2, 1, 1]
    ms = iter([9.0, 8.0, 7.0])
    made = timing.time_kernel("sample", CPU)
    assert made["figures"] == {} and made["timings"][0]["triton_ms"] is None


def test_the_worst_of_several_parts_stands_and_the_newest_of_one() -> None:
    step = {
        "model": "M-7B", "context": 4096, "floor_ms": 4.0, "step_ms": 5.0, "share_of_floor": 0.8,
        "windows_ms": {"32": 5.5, "64": 6.5}, "window_ratios": {"32": 1.1, "64": 1.3},
        "generate_ms": 30.0, "generate_ratio": 6.0, "compiled_ms": 10.0, "compiled_ratio": 2.0,
        "route": "model", "attention": "window_attention", "nodes": 1260, "runner": "cuda graphs",
        "reason": "",
    }  # fmt: skip
    fallback = step | {"attention": "no | kernel", "nodes": None, "compiled_ms": None}
    fallback |= {"runner": "eager", "reason": "it synchronises"}
    attention = {
        "model": "M-7B", "width": 32, "room": 4096, "ours_ms": 0.125, "share_of_copy": 0.5,
        "sdpa_ms": 0.25, "flex_ms": None, "flex_reason": "E: a | b", "loses": True,
    }  # fmt: skip
    scene = {
        "batch": 8, "guidance": 2.0, "route": "library", "policy": "J()",
        "tokens_per_pass": 4.0, "seconds": 0.0625,
        "first_seconds": 0.5, "captures": [2, 0, 0], "images_per_s": 16.0, "speed_up": 12.0,
        "attention": "no / kernel", "runner": "cuda graphs", "forward": "fused", "outside": 0.0625,
    }  # fmt: skip

    compiled = scene | {"policy": None, "route": "library-static", "outside": None}
    canvas = {
        "batch": 8, "policy": "L()", "exactness": "bitwise", "passes": 39.5, "same": 23,
        "pictures": 24, "first_seconds": 0.5, "seconds": 0.125, "images_per_s": 8.0,
        "speed_up": 4.0,
    }  # fmt: skip

    def part(date: str, share: float, ratio: float, **rows: Any) -> dict[str, Any]:
        figures = {"step_share_of_floor": share, "window_32_step_ratio": ratio}
        return {"status": "passed", "date": date, "figures": figures, **rows}

    facts = {"device": "A", "versions": {"torch": "2"}, "date": "2026-01-01", "command": "c"}
    old = {"parts": {"one": part("1", 0.1, 9.0, steps=[step | {"model": "Old"}])}}
    new = {"parts": {
        "one": part("2", 0.9, 1.1, steps=[step, fallback]), "two": part("2", 0.7, 1.25),
        "three": part("2", 0.8, 1.2, attention=[attention], canvas=[canvas],
                      scenes=[scene, scene | {"policy": None}, compiled]),
    }}  # fmt: skip
    names = ("figures", "steps", "attention", "scenes", "canvas")
    marks = "\n".join(f"<!-- table: gpu-{name} -->\n<!-- end -->" for name in names)
    filled = fill_tables(marks, {"gpu-a": facts | new, "gpu-b": facts | old})
    assert (
        f"| {FIGURES['step_share_of_floor'].what} | at least 75 % at 7B, 60 % at 1B | 70 % |"
        in filled
    )
    assert f"| {FIGURES['window_32_step_ratio'].what} | at most 1.15× | 1.25× |" in filled
    times = "| 4096 | 4.00 | 5.00 | 80 % | 5.50 | 6.50 | 1.10×, 1.30× | 30.00 | 6.00× |"
    assert f"| M-7B | model | kernel | 1260 {times} 10.00 | 2.00× |" in filled
    how = "own: no / kernel; not captured: it synchronises"
    assert f"| M-7B | model | {how} | – {times} – | – |" in filled
    assert "| Old |" not in filled
    assert "| M-7B | 32 | 4096 | 0.125 | 50 % | 0.250 | none: E: a / b | yes |" in filled
    seconds = "4.00 | 0.5000 | 0.0625 | 16.00 | 12.00×"
    assert f"| 8 | 2 | transformers alone | its own | {seconds} | 6 % |" in filled
    own = "fused, attention its own: no / kernel"  # a fallback's figure says so
    assert f"| 8 | 2 | `J()` | {own} | {seconds} | 6 % |" in filled
    assert "| 8 | `L()` | bitwise | 39.5 | 23 of 24 | 0.5000 | 0.1250 | 8.00 | 4.00× |" in filled
    assert f"| transformers, static cache, compiled pass | its own | {seconds} | – |" in filled
    assert fill_tables(marks, {}).count("Not yet measured.") == 4


@pytest.fixture
def no_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What conftest fills new memory with would be counted."""
    monkeypatch.setattr(torch, "empty", EMPTY[0])
    monkeypatch.setattr(torch, "empty_like", EMPTY[1])
    monkeypatch.setattr(Tensor, "new_empty", EMPTY[2])


@pytest.mark.usefixtures("no_poison")
def test_a_pass_is_counted_as_a_gpu_would_launch_it() -> None:
    """By hand: a product, a sum, no view; launches of kernels instead of their operations."""
    pytest.importorskip("triton")
    x = torch.ones(4, 6)
    counted = record_step(lambda: (x.view(6, 4).t() @ torch.empty(6, 3)).add_(1)[0].expand(2, 3))
    assert counted == {"mm": 1, "add_": 1}
    model = build_lm("llama")
    window = CausalLMWindow(model, attention="kernel")
    prompt, noise = make_prompt([[5, 9]]), Noise.from_seed(0, 1)

    def run(runner: Any) -> None:
        window.runner = runner
        Jacobi(4).sample(window, prompt, 20, params=SamplingParams(), noise=noise)

    counted = record_pass(run)
    n_layers = model.config.num_hidden_layers
    assert counted["triton: attend_kernel"] == n_layers  # short keys are not split
    assert counted["triton: sample_kernel"] > 0 and counted["mm"] == 7 * n_layers + 1
    assert counted["bmm"] == counted["softmax"] == counted["_softmax"] == 0
