"""What the parts of the check on GPUs measure and compare: sizes, a clock, tokens, arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import bitwise, kernels, steps
from benchmarks.gpu.bitwise import Case, Run, compare, decode, find_mistake, tiny_llama
from benchmarks.gpu.kernels import TIMINGS, Timing, cache
from benchmarks.gpu.methods import Call, check_methods
from benchmarks.gpu.models import SIZES, Size, build, open_window, shrink
from benchmarks.gpu.parts import CheckError
from benchmarks.gpu.steps import Enough, Stopwatch, step_figures, time_route, time_step
from benchmarks.report import FIGURES
from mmaccel import Autoregressive, CausalLMWindow, Jacobi, SpeculativeJacobi
from mmaccel.contracts import Pass
from mmaccel.errors import UnsupportedModelError
from mmaccel.kernels.dispatch import KERNELS, refuse
from mmaccel.kernels.norm import Norm
from mmaccel.samplers.window.run import WindowRun
from mmaccel.samplers.window.step_runner import StepRunner
from tests.fixtures.graph_replay import Replay
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import make_prompt

pytestmark = pytest.mark.slow

CPU, META = torch.device("cpu"), torch.device("meta")
with META:  # torch notes at the first use which functions make tensors: the real ones, not those
    torch.empty(0)  # that conftest puts in their place


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)
def test_a_model_built_on_the_device_is_like_any_other(size: Size) -> None:
    """Buffers are those of the class, weights random, and a window sees image tokens alone."""
    small = shrink(size)
    model = build(small, CPU, torch.float32)
    config = copy.deepcopy(model.config)
    if hasattr(config, "vision_config"):
        config.vision_config.depth = 1  # of the part that `build` leaves out
    fresh = dict(type(model)(config).named_buffers())
    assert all(fresh[name].equal(buffer) for name, buffer in model.named_buffers())
    assert any(name.endswith("rotary_emb.inv_freq") for name in fresh)
    assert 0.018 < float(model.get_output_embeddings().weight.detach().std()) < 0.022
    window = open_window(model, small)
    assert window.vocab_size == (128 if small.codes is None else 96)
    if small.codes is not None:
        window.begin(make_prompt([[1, 2]]))  # type: ignore[attr-defined]
    window.reserve(1, 8)
    logits = window.forward(Pass(torch.tensor([[1, 2]]), torch.tensor([0])))
    assert bool(logits.isfinite().all()) and float(logits.std()) > 0.01


class Ticking(Replay):
    """A replay takes 2 ms, a tenth for every token and a hundredth for every token of the prompt;
    all other passes take 1000 s.
    """

    now = 0.0

    def __init__(self, n_prompt: int = 0) -> None:
        super().__init__(4)
        self.n_prompt = n_prompt

    def run_step(self, key: Hashable | None, step: Callable[[], None]) -> bool:
        is_usual = super().run_step(key, step)
        width, n_passes = key if isinstance(key, tuple) else (key, 1)
        ms = n_passes * (2 + 0.1 * int(str(width)) + 0.01 * self.n_prompt) if is_usual else 1e6
        Ticking.now += ms / 1000
        return is_usual


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(window: Any, prompt: Any, *_: Any) -> Ticking:
        return Ticking(prompt.tokens.shape[1])

    monkeypatch.setattr(steps, "make_runner", make)
    monkeypatch.setattr(steps, "device_clock", lambda device: lambda: Ticking.now)


def test_the_watch_reads_replays_alone() -> None:
    """Groups of four between two reads of the host, of which the median counts."""
    runner = Ticking()
    watch = Stopwatch(runner, (10, 2), lambda: Ticking.now)
    runner.load(None, {"rows.n_generated": torch.tensor([3, 5])})
    total = torch.zeros(())
    with pytest.raises(Enough):
        while True:
            runner.run_step(8, lambda: total.add_(1))
            if watch.timed == 4:
                Ticking.now += 1.0  # in one of the three groups
    assert watch.timed == 12 and watch.seconds == pytest.approx(0.0028)
    # aside, the record, three warm passes, and the timed ones
    assert int(total) == 1 + 1 + 3 + 12 and watch.generated == [4.0] * 4
    watch.release()
    runner.run_step(8, lambda: total.add_(1))
    assert watch.timed == 12


def test_steps_of_a_model_and_their_ratios(ticking: None) -> None:
    model = build_lm("llama", max_position_embeddings=320)
    window = CausalLMWindow(model)
    row = time_route("model", window, 24, 0.25, (4, 8), (8, 2))
    seen = row["step"]["positions"]  # the prompt, thirteen passes, and half of those timed
    assert seen == 24 + 13 + 4
    weights = 4 * (2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32 + 40 * 32)
    assert row["bytes"] == weights + 4 * 2 * 2 * 32 * 2 * seen
    assert row["floor_ms"] == pytest.approx(row["bytes"] / 250_000)  # 0.25 GB/s
    assert row["step_ms"] == pytest.approx(2.34)
    for w in (4, 8):
        wide, beside = row["windows"][str(w)], row["beside"][str(w)]
        assert wide["ms"] == pytest.approx(2.24 + 0.1 * w) and wide["passes"] == 8
        assert abs(wide["positions"] - (w - 1) - beside["positions"]) <= 1
        assert row["window_ratios"][str(w)] == wide["ms"] / beside["ms"]
    assert any(row["beside"][w] is not row["step"] for w in "48")
    # on a CPU the layers run the model's own attention: no figure is made of it
    assert row["fallbacks"] == ["the model is on cpu"] and window.setup.runner is None
    row |= {"generate_ratio": 5.0, "compiled_ratio": None}
    assert step_figures([row]) == {}
    row["fallbacks"] = []
    figures = step_figures([row | {"step_ms": 9.0, "generate_ratio": 1.0}, row])  # the faster one's
    assert set(figures) == {
        "step_share_of_floor", "eager_step_ratio", "window_4_step_ratio", "window_8_step_ratio",
    }  # fmt: skip
    assert figures["eager_step_ratio"] == 5.0
    with pytest.raises(CheckError, match="at 8 positions: expected 4 passes to time or more"):
        time_step(window, Autoregressive(), 8, room=12)


def replay(window: Any, prompt: Any, policy: Any, params: Any, sync_every: int) -> Replay:
    return Replay(sync_every)


def llama_case(dtype: torch.dtype = torch.float32) -> Case:
    def prompt(rows: int, guided: bool) -> Any:
        lists = [[5, 9, 11][: 1 + r % 3] for r in range(rows)]
        return make_prompt(lists + lists[::-1] * guided, 1 + guided)

    return Case("tiny", CausalLMWindow(tiny_llama(CPU, dtype)), prompt, dtype)


def test_the_same_tokens_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [
        (Run(policy, 3, scale, 14, None), Run(policy, 3, scale, 14, 4))
        for policy in (Jacobi(4), SpeculativeJacobi(4))
        for scale in (1.0, 2.5)
    ]
    monkeypatch.setattr(bitwise, "make_runner", replay)
    runs = list(compare(llama_case(), pairs))
    assert [(row["same"], row["wrong"], row["runner"]) for row in runs] == (
        [(1.0, "", "cuda graphs")] * 4
    )
    monkeypatch.setattr(bitwise, "_runner_of", lambda device, name: name)
    monkeypatch.setattr(bitwise, "make_runner", lambda *_: StepRunner())
    (row,) = compare(llama_case(), pairs[:1])
    assert row["wrong"] == "expected captured passes, received eager"


def test_other_tokens_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that part where the scores are far apart; next to equal ones are counted alone."""
    monkeypatch.setattr(bitwise, "make_runner", replay)
    case, turns = llama_case(), iter(range(100))
    case.prompt = lambda rows, guided: make_prompt([[5 + next(turns)]] * rows)
    (run,) = compare(case, [(Run(Jacobi(4), 1, 1.0, 14, None), Run(Jacobi(4), 1, 1.0, 14, 1))])
    assert "of 14 tokens differ, the first with scores" in run["wrong"] and run["same"] < 1
    tokens = torch.arange(20)[None]
    other, most = tokens + (tokens == 19), 0.001
    assert find_mistake(tokens, other, "cuda graphs", most) == ""
    assert find_mistake(tokens, other, "cuda graphs", 2 * most).endswith("0.001 at most")
    assert find_mistake(tokens, other, "cuda graphs") == ""  # 95 % are the same
    others = tokens + (tokens > 16)
    assert find_mistake(tokens, others, "cuda graphs") == "3 of 20 tokens differ"


@pytest.mark.parametrize("guided", [False, True])
def test_the_gap_is_that_of_the_plain_loop_s_scores(
    guided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that part at a known slot: the winner's score less that of the token put there."""
    case, scores = llama_case(), list[Tensor]()
    run = Run(Autoregressive(), 2, 1.0 + 1.5 * guided, 9, None)

    def watch(run: Any) -> Tensor:
        found = forward(run)
        scores.append(found[:, 0] + run.noise.gumbel(run.rows.slots, run.vocab_size)[:, 0])
        return found

    forward = WindowRun.forward
    with monkeypatch.context() as patch:
        patch.setattr(WindowRun, "forward", watch)
        plain = decode(case, run).tokens
    other = plain.clone()
    other[0, 4] = (other[0, 4] + 3) % 64
    other[1, 7:] = (other[1, 7:] + 1) % 64
    wanted = max(
        float(scores[slot][row, plain[row, slot]] - scores[slot][row, other[row, slot]])
        for row, slot in ((0, 4), (1, 7))
    )
    gap = bitwise.find_gap(case, run, plain, other)
    assert gap == pytest.approx(wanted, rel=1e-3) and wanted > 0.01
    assert bitwise.find_gap(case, run, plain, plain) is None


def test_jacobi_makes_the_plain_loop_s_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bitwise, "make_runner", replay)
    monkeypatch.setattr(bitwise, "make_case", lambda name, device, dtype: llama_case(dtype))
    rows = bitwise.check_promise("tiny", CPU, tiny=True)["promise"]
    assert [row["exactness"] for row in rows] == ["bitwise", "up to rounding"]
    assert all(row["same"] == 1 and row["tokens_per_pass"] > 1 for row in rows)
    verified = Jacobi.decode  # a planted bug: every draft is accepted

    def trusting(self: Any, run: Any) -> Any:
        accept = run.accept
        run.accept = lambda tokens, kept, *rest: accept(tokens, torch.ones_like(kept), *rest)
        return verified(self, run)

    monkeypatch.setattr(Jacobi, "decode", trusting)
    with pytest.raises(CheckError, match="2 of 2 runs failed: tiny, torch.float32") as caught:
        bitwise.check_promise("tiny", CPU, tiny=True)
    assert "scores" in str(caught.value) and len(caught.value.found["promise"]) == 2


def test_what_differs_from_a_cpu_or_raises_is_named() -> None:
    def call(name: str, *results: Any) -> Call:
        """A call that gives its results in turn, on a CPU first; an exception is raised."""
        given = iter(results)

        def make(device: torch.device) -> tuple[Tensor, Any]:
            found = next(given)
            if isinstance(found, Exception):
                raise found
            return found, SimpleNamespace(runner="eager", runner_reason="", passes=3)

        return Call(name, make)

    tokens = torch.arange(20).view(2, 10)
    many = tokens.clone()
    many[1, 4:] = 0
    refused = UnsupportedModelError("not here")
    calls = [call("many", tokens, many), call("short", tokens, tokens[:, :9])]
    calls += [call("same", tokens, tokens), call("no", refused)]
    calls.append(call("broken", tokens, ValueError("on two devices")))
    with pytest.raises(CheckError, match="3 of 5 methods failed") as caught:
        check_methods("layers", CPU, iter(calls))
    said, found = str(caught.value), caught.value.found
    assert (found["passed"], found["refused"]) == (1, 1)
    assert "many: 0.70 of the tokens" in said and "broken: ValueError: on two devices" in said
    assert "short: expected [2, 10] tokens, received [2, 9]" in said
    with pytest.raises(CheckError, match="all 1 methods were refused: not here"):
        check_methods("layers", CPU, iter([call("no", refused)]))


def size_of(value: Any) -> int:
    """Bytes of all tensors in a value."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Norm):
        return size_of((value.weight, value.bias))
    return sum(map(size_of, value)) if isinstance(value, tuple) else 0


READ_PARTS = ("compact", "coarse_rounds", "window_inputs", "accept_prefix")  # of an operand


@pytest.mark.parametrize(
    ("kernel", "timing"),
    [pytest.param(k, t, id=f"{k}: {t.name}") for k, rows in TIMINGS.items() for t in rows],
)
def test_timings_are_calls_that_both_versions_take(kernel: str, timing: Timing) -> None:
    """Shapes fit, Triton refuses nothing, and bytes are those of operands and results."""
    pytest.importorskip("triton")
    assert kernel in KERNELS and (timing.figure or "product") in FIGURES
    args = timing.prepare(META)
    specification = getattr(import_module(f"mmaccel.kernels.{kernel}"), timing.function)
    made = specification(*args, **timing.options)
    assert refuse(specification, args, timing.options) is None
    moved = size_of(args) + size_of(made)
    if kernel not in READ_PARTS:
        assert 0.97 * moved < timing.n_bytes <= moved


@pytest.mark.filterwarnings("ignore")
def test_all_attentions_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for width, room in ((1, 64), (5, 100)):
        held = [cache(2, 4, 2, width, 16, room, CPU) for _ in range(2)]
        kinds = (kernels.our_calls, kernels.sdpa_calls, kernels.flex_calls)
        for ours, *others in zip(*(kind(held) for kind in kinds), strict=True):
            for other in others:
                # bfloat16 results of values of size 1: two roundings of 2^-8
                torch.testing.assert_close(other().float(), ours()[0].float(), rtol=0.02, atol=0.01)

    def refuse(function: Any, **_: Any) -> Any:
        raise ValueError("no such tile")

    monkeypatch.setattr(torch, "compile", refuse)
    row = kernels._time_flex(held, CPU)
    assert row == {"flex_ms": None, "flex_reason": "ValueError: no such tile"}
