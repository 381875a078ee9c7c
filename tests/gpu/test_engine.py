"""The engine's parts of the check on GPUs, on a processor: tiny models, recorded steps, a clock
that moves by known amounts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Hashable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import bitwise, check, scenes
from benchmarks.gpu.bitwise import Case, check_bitwise, compare, decode, find_mistake, tiny_llama
from benchmarks.gpu.canvas import POLICIES, measure_canvas
from benchmarks.gpu.check import main, run_process
from benchmarks.gpu.models import SIZES, Size, build, key_bytes, open_window, shrink, sketch
from benchmarks.gpu.models import weight_bytes as bytes_of
from benchmarks.gpu.parts import CheckError
from benchmarks.gpu.scenes import measure_scenes
from benchmarks.gpu.steps import Enough, Stopwatch, find_figures, measure_steps, time_step
from benchmarks.route_runs import Piece, Routes, Way
from mmaccel import Autoregressive, CausalLMWindow, Jacobi, SpeculativeJacobi, TextToImage
from mmaccel.contracts import Pass
from mmaccel.pipelines.runner.cuda_graphs import GraphCache
from mmaccel.pipelines.runner.engine import Engine
from mmaccel.results import Stats
from mmaccel.samplers.window.run import WindowRun
from mmaccel.samplers.window.step_runner import EagerRunner
from tests.fixtures.graph_replay import Replay
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.tiny_model import masked_beside_plain
from tests.fixtures.toy_models import make_prompt

CPU = torch.device("cpu")
with torch.device("meta"):  # torch notes at the first use which functions make tensors: the real
    torch.empty(0)  # ones, not those that conftest puts in their place


@pytest.mark.parametrize(
    ("name", "layers", "width", "inner", "key_width", "n_ids"),
    [
        ("Janus-Pro-1B", 24, 2048, 5632, 2048, 16_384),
        ("Janus-Pro-7B", 30, 4096, 11_008, 4096, 16_384),
        ("Chameleon-7B", 32, 4096, 11_008, 4096, 8192),
        ("Emu3-8B", 32, 4096, 14_336, 1024, 32_768),
    ],
)
def test_sizes_are_the_published_ones(
    name: str, layers: int, width: int, inner: int, key_width: int, n_ids: int
) -> None:
    size = next(size for size in SIZES if size.name == name)
    model = sketch(size)
    assert size.codes is None or len(size.codes) == n_ids
    matrices = layers * (2 * width**2 + 2 * width * key_width + 3 * width * inner) + n_ids * width
    assert 0 <= bytes_of(model, n_ids) - 2 * matrices < 2 * matrices * 0.001  # norms
    assert key_bytes(model, 2, 1000) == 2 * 1000 * layers * 2 * key_width * 2


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)
def test_a_model_built_on_the_device_is_like_any_other(size: Size) -> None:
    """Buffers are those of the class, weights random, and a window sees image tokens alone."""
    small = shrink(size)
    model = build(small, CPU, torch.float32)
    usual = type(model)(model.config)
    fresh = dict(usual.named_buffers())
    assert all(fresh[name].equal(buffer) for name, buffer in model.named_buffers())
    assert any(name.endswith("rotary_emb.inv_freq") for name, _ in model.named_buffers())
    head = model.get_output_embeddings().weight
    assert 0.018 < float(head.detach().std()) < 0.022
    window = open_window(model, small)
    assert window.vocab_size == (128 if small.codes is None else 96)
    if small.codes is not None:
        window.begin(make_prompt([[1, 2]]))  # type: ignore[attr-defined]
    window.reserve(1, 8)
    logits = window.forward(Pass(torch.tensor([[1, 2]]), torch.tensor([0])))
    assert bool(logits.isfinite().all()) and float(logits.std()) > 0.01


class Time:
    """Seconds that move when something is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Ticking(Replay):
    """A replay takes 2 ms, a tenth for every token and a hundredth for every token of the prompt;
    all other passes take 1000 s.
    """

    def __init__(self, clock: Time, n_prompt: int = 0) -> None:
        super().__init__(4)
        self.clock, self.n_prompt = clock, n_prompt

    def run_step(self, key: Hashable | None, step: Callable[[], None]) -> bool:
        is_usual = super().run_step(key, step)
        ms = 2 + 0.1 * int(str(key)) + 0.01 * self.n_prompt if is_usual else 1e6
        self.clock.now += ms / 1000
        return is_usual


def ticking(clock: Time) -> Any:
    """Makes a `Ticking` runner for a prompt."""
    return lambda window, prompt, *_: Ticking(clock, prompt.tokens.shape[1])


def test_the_watch_reads_replays_alone() -> None:
    """Groups of four between two reads of the host, of which the median counts."""
    clock = Time()
    watch = Stopwatch(Ticking(clock), 10, clock, n_warm=2)
    watch.load(None, {"buffer.n_generated": torch.tensor([3, 5])})
    assert (watch.name, watch.is_static, watch.sync_every) == ("cuda graphs", True, 4)
    total = torch.zeros(())
    with pytest.raises(Enough):
        while True:
            watch.run_step(8, lambda: total.add_(1))
            if watch.timed == 4:
                clock.now += 1.0  # in one of the three groups
    assert watch.timed == 12 and watch.seconds == pytest.approx(0.0028)
    # aside, the record, three warm passes, and the timed ones
    assert int(total) == 1 + 1 + 3 + 12 and watch.generated == (4.0, 4.0)


def test_steps_of_a_model_and_their_ratios() -> None:
    clock = Time()
    model = build_lm("llama", max_position_embeddings=256)

    def tick(*_: object) -> None:
        clock.now += 0.010

    model.register_forward_hook(tick)
    window = CausalLMWindow(model)
    made = measure_steps(
        "tiny", model, window, 0.25, clock, contexts=(24, 40), windows=(4, 8),
        make_runner=ticking(clock), n_passes=8, n_warm=2,
    )  # fmt: skip
    first, second = made["steps"]
    weights = 4 * (2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32 + 40 * 32)
    for row, context in ((first, 24), (second, 40)):
        seen = row["step"]["positions"]  # the prompt, nine passes, and half of those timed
        assert seen == context + 9 + 4
        assert row["bytes"] == weights + 4 * 2 * 2 * 32 * 2 * round(seen)
        assert row["floor_ms"] == pytest.approx(row["bytes"] / 250_000)  # 0.25 GB/s
        assert row["step_ms"] == pytest.approx(2.1 + context / 100)
        assert row["generate_ms"] == pytest.approx(10.0)
        for w in (4, 8):
            wide, beside = row["windows"][str(w)], row["beside"][str(w)]
            assert wide["ms"] == pytest.approx(2 + 0.1 * w + context / 100)
            assert wide["tokens_per_pass"] >= 1 and wide["passes"] == 8
            assert abs(wide["positions"] - (w - 1) - beside["positions"]) <= 1
            assert row["window_ratios"][str(w)] == wide["ms"] / beside["ms"]
        assert any(row["beside"][w] is not row["step"] for w in "48")
        assert row["nodes"] > 50 and row["step"]["nodes_by"] == "recorded operations"
        assert (row["route"], row["runner"], row["reason"]) == ("model", "cuda graphs", "")
        # on a CPU the layers run the model's own attention: no figure is made of it
        assert row["fallbacks"] == ["the model is on cpu"]
    assert first["compiled_ms"] == pytest.approx(10.0) and second["compiled_ms"] is None
    assert made["figures"] == {}
    for row in made["steps"]:
        row["fallbacks"] = []
    figures = find_figures(made["steps"], (4, 8))
    assert figures == pytest.approx({  # the worse context's
        "step_share_of_floor": min(row["floor_ms"] / row["step_ms"] for row in (first, second)),
        "eager_step_ratio": 10 / 2.5, "compiled_step_ratio": 10 / 2.34,
        "window_4_step_ratio": max(row["window_ratios"]["4"] for row in (first, second)),
        "window_8_step_ratio": max(row["window_ratios"]["8"] for row in (first, second)),
    })  # fmt: skip
    # of two routes the faster one counts
    fused = dict(second, route="fused", step_ms=1.25, generate_ratio=8.0)
    best = find_figures([first, second, fused], (4, 8))["eager_step_ratio"]
    assert best == pytest.approx(10 / 2.34)
    assert window.runner is None


def test_every_window_has_the_same_room_and_prompt() -> None:
    clock, model = Time(), build_lm("llama")
    window, sizes = CausalLMWindow(model), []
    reserve = window.reserve
    window.reserve = lambda rows, size: (sizes.append((rows, size)), reserve(rows, size))[1]  # type: ignore[method-assign, assignment]
    few = {"make_runner": ticking(clock), "n_passes": 4, "n_warm": 1, "room": 90}
    for policy in (Autoregressive(), Jacobi(4)):
        step = time_step(window, policy, 20, clock, **few)  # type: ignore[arg-type]
        assert step["ms"] == pytest.approx(2.2 + 0.1 * getattr(policy, "window", 1))
    assert sizes == [(2, 89), (2, 89)]  # the last token is not forwarded


def test_a_run_too_short_to_time_is_an_error() -> None:
    clock, window = Time(), CausalLMWindow(build_lm("llama"))
    with pytest.raises(CheckError, match="at 8 positions: expected 4 passes to time or more"):
        time_step(window, Autoregressive(), 8, clock, room=12, make_runner=ticking(clock))
    assert window.runner is None


def choose(cuda_graphs: Any, sync_every: int, *_: Any, cache: GraphCache | None = None) -> Any:
    return EagerRunner(sync_every) if cuda_graphs is False else Replay(sync_every, cache)


def llama_case() -> Case:
    def prompt(rows: int, guided: bool) -> Any:
        lists = [[5, 9, 11][: 1 + r % 3] for r in range(rows)]
        return make_prompt(lists + lists[::-1] * guided, 1 + guided)

    return Case("tiny", CausalLMWindow(tiny_llama(CPU)), prompt)


def test_the_same_tokens_captured_and_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    case = llama_case()
    monkeypatch.setattr(bitwise, "make_case", lambda name, device: case)
    monkeypatch.setattr(Engine, "check", lambda *_: None)
    shared = [True]

    def runner(self: Engine, *_: Any) -> Any:
        return choose(self.cuda_graphs, self.sync_every, cache=self.cache if shared[0] else None)

    monkeypatch.setattr(Engine, "runner", runner)
    batches = ((1, 1), (3, 4))
    both = {"policies": (Jacobi(4), SpeculativeJacobi(4)), "batches": batches, "length": 14}
    both["names"] = ("tiny", bitwise.ATTACHED)
    one = both | {"policies": (Jacobi(4),)}
    # 2 policies, 2 scales and 2 batches; attached 2 policies, 2 rhythms, guided and not
    assert check_bitwise(CPU, choose, **both) == {"passed": 16, "least_same": 1.0, "bitwise": []}
    monkeypatch.setattr(bitwise, "_runner_of", lambda device, name: name)
    with pytest.raises(CheckError, match="4 of 8 runs failed: tiny, Jacobi") as caught:
        check_bitwise(CPU, lambda *_: EagerRunner(), **one)
    assert caught.value.found["passed"] == 4
    assert set(caught.value.found["failed"].values()) == {
        "expected captured passes, received eager"
    }
    shared[0] = False
    with pytest.raises(CheckError, match="4 of 8 runs failed: attached, Jacobi") as caught:
        check_bitwise(CPU, choose, **one)
    assert set(caught.value.found["failed"].values()) == {
        "expected the first call's graphs in the second, received 1 more"
    }


def test_other_tokens_are_found() -> None:
    """Tokens that part where the scores are far apart; next to equal ones are counted alone."""
    case = llama_case()
    turns = iter(range(100))
    case.prompt = lambda rows, guided: make_prompt([[5 + next(turns)]] * rows)
    (run,) = compare(case, choose, [Jacobi(4)], [(1, 1)], [1.0], 14)
    assert "of 14 tokens differ, the first with scores" in run["wrong"] and run["same"] < 1
    tokens = torch.arange(20)[None]
    other, most = tokens + (tokens == 19), bitwise.GAPS[torch.float32]
    assert find_mistake(tokens, other, "cuda graphs", most) == ""
    assert find_mistake(tokens, other, "cuda graphs", 2 * most).endswith("0.001 at most")
    assert find_mistake(tokens, other, "cuda graphs") == ""  # 95 % are the same
    others = tokens + (tokens > 16)
    assert find_mistake(tokens, others, "cuda graphs") == "3 of 20 tokens differ"
    assert "expected tokens [1, 20], received [1, 19]" in find_mistake(
        tokens, tokens[:, :19], "cuda graphs"
    )


@pytest.mark.parametrize("guided", [False, True])
def test_the_gap_is_that_of_the_plain_loop_s_scores(guided: bool) -> None:
    """Rows that part at a known slot: the winner's score less that of the token put there."""
    case, scale = llama_case(), 1.0 + 1.5 * guided
    scores: list[torch.Tensor] = []

    def watch(run: Any) -> torch.Tensor:
        found = forward(run)
        scores.append(found[:, 0] + run.noise.gumbel(run.buffer.slots, run.vocab_size)[:, 0])
        return found

    forward = WindowRun.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WindowRun, "forward", watch)
        plain = decode(case, Autoregressive(), 2, scale, False, 1, choose, 9).tokens
    assert len(scores) == 9
    other = plain.clone()
    other[0, 4] = (other[0, 4] + 3) % 64
    other[1, 7:] = (other[1, 7:] + 1) % 64
    wanted = max(
        float(scores[slot][row, plain[row, slot]] - scores[slot][row, other[row, slot]])
        for row, slot in ((0, 4), (1, 7))
    )
    gap = bitwise.find_gap(case, Jacobi(4), 2, scale, plain, other)
    assert gap == pytest.approx(wanted, rel=1e-3) and wanted > 0.01
    assert bitwise.find_gap(case, Jacobi(4), 2, scale, plain, plain) is None
    assert bitwise.find_gap(case, SpeculativeJacobi(4), 2, scale, plain, other) is None


def test_jacobi_makes_the_plain_loop_s_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    few: Any = {"cases": [llama_case()], "windows": (4,), "rows": 2, "length": 14}
    made = bitwise.check_promise(CPU, choose, dtypes=(torch.float32,), **few)
    assert made["passed"] == 2 and made["least_same"] == 1.0
    for row in made["promise"]:
        assert (row["exactness"], row["dtype"], row["runner"]) == (
            "bitwise",
            "float32",
            "cuda graphs",
        )
        assert row["tokens_per_pass"] > 1 and "model's own" in row["attention"]
    half = Case("half", CausalLMWindow(tiny_llama(CPU, torch.bfloat16)), few["cases"][0].prompt)
    made = bitwise.check_promise(CPU, choose, dtypes=(torch.bfloat16,), **few | {"cases": [half]})
    assert {row["exactness"] for row in made["promise"]} == {"up to rounding"}
    verified = Jacobi.decode  # a planted bug: every draft is accepted

    def trusting(self: Any, run: Any) -> Any:
        accept = run.accept
        run.accept = lambda tokens, kept, *rest: accept(tokens, torch.ones_like(kept), *rest)
        return verified(self, run)

    monkeypatch.setattr(Jacobi, "decode", trusting)
    with pytest.raises(CheckError, match="2 of 2 runs failed: tiny, torch.float32") as caught:
        bitwise.check_promise(CPU, choose, dtypes=(torch.float32,), **few)
    assert "scores" in str(caught.value) and len(caught.value.found["promise"]) == 2


def test_every_model_has_prompts_for_every_batch_and_runs_by_its_forward() -> None:
    cases = [bitwise.make_case(name, CPU) for name in bitwise.CASES]
    for case, route in zip(cases, ("fused", "fused", "model", "model"), strict=True):
        assert decode(case, Jacobi(4), 2, 1.0, False, 1, choose, 4).stats.route == route
        for rows, guided in ((1, False), (3, True), (8, True)):
            prompt = case.prompt(rows, guided)
            assert (prompt.batch, prompt.branches) == (rows, 1 + guided)
            assert int(prompt.tokens.max()) < case.window.model.config.vocab_size


class FakeRoutes:
    """Ways that take known seconds, three quarters of them in a step; a first run takes 1000."""

    pipe = SimpleNamespace(image_model=SimpleNamespace(examples=("a", "b", "c")))

    def __init__(self, runner: str = "cuda graphs", is_refused: bool = False) -> None:
        self.is_refused = is_refused
        self.runner, self.seen, self.captions = runner, set[Way](), set[tuple[str, ...]]()
        self.now = 0.0

    def spend(self, seconds: float) -> None:
        """What happens in a step of known length."""
        self.now += seconds

    def run(self, way: Way, captions: Any, seeds: Any) -> Piece:
        assert len(captions) == len(seeds) == way.batch_size
        self.captions.add(tuple(captions))
        plain = 8.0 * way.guidance * way.batch_size**0.5
        share = {None: 1.0, Jacobi(32): 0.125, Jacobi("adaptive"): 0.1}[way.policy]
        if way.route == "library-static":
            if self.is_refused:
                raise ValueError("no static cache")
            return Piece(torch.zeros(1), None, plain / 2)
        seconds = plain * share * (0.5 if way.guidance == 2.0 else 1.0) if way.policy else plain
        captures = 0
        if way not in self.seen:
            self.seen.add(way)
            seconds, captures = 1000.0, 3
        stats = Stats(tokens=256, row_passes=64, runner=self.runner, runner_reason="x")
        stats.captures = captures
        if way.policy:
            EagerRunner().run_step(None, lambda: self.spend(0.75 * seconds))
        return Piece(torch.zeros(1), stats if way.policy else None, seconds)


def test_images_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    routes: Any = FakeRoutes()
    monkeypatch.setattr(scenes, "device_clock", lambda device: lambda: routes.now)
    made = measure_scenes(CPU, routes, batches=(1, 64))
    assert len(made["scenes"]) == 2 * 2 * 4 and (*"abc" * 21, "a") in routes.captions
    own = {
        (r["batch"], r["guidance"], r["policy"]): r
        for r in made["scenes"]
        if "static" not in r["route"]
    }
    assert own[1, 2.0, None]["seconds"] == 16 and own[64, 1.0, None]["images_per_s"] == 1
    single = own[1, 1.0, repr(Jacobi(32))]
    assert single["speed_up"] == 8 and single["tokens_per_pass"] == 4
    assert (single["first_seconds"], single["captures"]) == (1000, [3, 0, 0])
    many = own[64, 1.0, None]
    assert many["first_seconds"] == 1000 / 64 and many["captures"] == [] and not many["forward"]
    assert single["outside"] == pytest.approx(0.25, abs=0.01) and many["outside"] is None
    assert made["figures"] == pytest.approx({
        "product_compiled": 5.0,
        "product": 10.0,  # batch 1, the faster window, the worse of the two scales (10 and 20)
        "scenes_outside": 0.25,
        "scenes_images_per_s": 64 / 6.4,  # batch 64: 8 * 8 * 0.1 = 6.4 s for all
    }, abs=0.01)  # fmt: skip
    split = [measure_scenes(CPU, routes, batches=(n,))["figures"] for n in (1, 8, 64)]
    assert [len(figures) for figures in split] == [3, 0, 1]  # a part of the report for each batch
    assert split[0] | split[2] == pytest.approx(made["figures"], abs=0.01)


def test_images_without_a_compiled_loop() -> None:
    routes: Any = FakeRoutes(is_refused=True)
    made = measure_scenes(CPU, routes, batches=(1,), scales=(1.0,))
    assert len(made["scenes"]) == 3 and set(made["figures"]) == {"product", "scenes_outside"}
    assert {row["compiled_reason"] for row in made["scenes"]} == {"ValueError: no static cache"}


def test_images_that_were_not_captured_are_no_result() -> None:
    routes: Any = FakeRoutes("eager")
    with pytest.raises(CheckError, match="2 of 2 were not captured") as caught:
        measure_scenes(CPU, routes, batches=(1,), scales=(1.0,))
    assert len(caught.value.found["scenes"]) == 4
    made = measure_scenes(CPU, routes, batches=(1,), scales=(1.0,), needs_graphs=False)
    assert made["figures"] == {} and len(made["scenes"]) == 4


def test_images_of_the_real_model() -> None:
    routes = Routes("scenes", length=4)
    with pytest.raises(CheckError, match="not captured") as caught:
        measure_scenes(CPU, routes, batches=(2,), scales=(1.0,), repeats=1)
    rows = caught.value.found["scenes"]
    assert [row["policy"] is None for row in rows] == [True, True, False, False]
    assert [row["route"] for row in rows[:2]] == ["library", "library-static"]
    assert all(row["seconds"] > 0 for row in rows) and "cpu" in rows[2]["reason"]
    assert [row["forward"] for row in rows] == ["", "", "fused", "fused"]
    assert all(0 < row["outside"] < 0.9 for row in rows[2:])


def test_canvases_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = TextToImage.from_pretrained(masked_beside_plain(tmp_path)[0])
    ticks: list[float] = []
    call = TextToImage.__call__

    def timed(self: Any, captions: Any, **options: Any) -> Any:
        made = call(self, captions, **options)
        first = options["seed"][0] == 0
        made.stats.seconds = 100.0 if first else made.stats.passes * 1.0
        ticks.append(made.stats.seconds)
        return made

    monkeypatch.setattr(TextToImage, "__call__", timed)
    made = measure_canvas(CPU, pipe, batches=(1, 3), repeats=2)
    rows = made["canvas"]
    assert len(rows) == 2 * len(POLICIES) and len(ticks) == 3 * len(rows)
    for batch, own in ((1, rows[: len(POLICIES)]), (3, rows[len(POLICIES) :])):
        plain, few, many, *others = own
        assert plain["policy"] == repr(POLICIES[0]) and plain["speed_up"] == 1
        assert (plain["passes"], plain["seconds"]) == (16, 16 / batch)
        assert (plain["first_seconds"], plain["pictures"]) == (100 / batch, 3 * batch)
        for row in (plain, few, many):
            assert (row["exactness"], row["same"]) == ("bitwise", 3 * batch)
        assert max(few["passes"], many["passes"]) < 16 and few["speed_up"] > 1
        assert all(row["exactness"] == "relaxed" for row in others)
        assert all(row["images_per_s"] == 1 / row["seconds"] for row in own)
        assert min(row["same"] for row in others) < 3 * batch  # it is counted
    slowest = min(rows[1]["speed_up"], rows[len(POLICIES) + 1]["speed_up"])
    assert made["figures"] == {"canvas_lossless_speed_up": slowest}


def test_other_tokens_than_the_reference_s_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, call = TextToImage.from_pretrained(masked_beside_plain(tmp_path)[0]), TextToImage.__call__

    def spoilt(self: Any, captions: Any, **options: Any) -> Any:
        made = call(self, captions, **options)
        if getattr(options["policy"], "drafts", 0) == 16 and options["seed"][0] == 0:
            made.tokens[0, 3] += 1
        return made

    monkeypatch.setattr(TextToImage, "__call__", spoilt)
    with pytest.raises(CheckError, match=r"reference's: LosslessUnmask\(drafts=16") as caught:
        measure_canvas(CPU, pipe, batches=(1,), repeats=1)
    assert [row["same"] for row in caught.value.found["canvas"][:3]] == [2, 2, 1]


CHILD = "import sys, json; file = open(sys.argv[sys.argv.index('--child') + 1], 'w'); "


def test_a_part_in_a_process_of_its_own() -> None:
    """Its result; its failure with what it found; what killed it, or that it did not end."""

    def run(program: str, limit: float = 60.0) -> dict[str, Any]:
        return run_process([sys.executable, "-c", program], limit)

    passed = CHILD + "json.dump({'status': 'passed', 'figures': {'a': 1.0}}, file)"
    assert run(passed) == {"figures": {"a": 1.0}}
    failed = CHILD + "json.dump({'status': 'failed', 'message': 'no', 'rows': [1]}, file)"
    with pytest.raises(CheckError, match="no") as caught:
        run(failed)
    assert caught.value.found == {"rows": [1]}
    with pytest.raises(CheckError, match="its process ended with -9 and no result"):
        run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(CheckError, match="did not end in 0 s"):
        run("import time; time.sleep(60)", 0.2)


def test_a_child_writes_what_its_part_found(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    arguments = ["--device", "cpu", "--tiny", "--part", "copy", "--child", str(file)]
    assert main(arguments, "") == 0
    made = json.loads(file.read_text())
    assert made["status"] == "passed" and made["copy_gb_per_s"] > 0


TINY = (
    "engine-promise-tiny-llama-fused",
    "methods-layers",
    "engine-step-emu3-8b-24",
    "scenes-1",
    "profile-janus-pro-1b",
    "time-compact",
    "time-window_attention-4",
    "time-window_attention-ragged",
)


def test_the_check_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A part of every kind, tiny: the report is whole, and no figure comes of it."""
    chosen = [text for name in TINY for text in ("--part", name)]
    assert main(["--device", "cpu", "--tiny", "--out", str(tmp_path), *chosen], "") == 0
    (file,) = tmp_path.iterdir()
    assert file.name == "check-cpu-tiny-sizes.json"  # which is in no table of the docs
    report = json.loads(file.read_text())
    assert set(report["parts"]) == set(TINY) and report["device"] == "cpu, tiny sizes"
    assert not any(part.get("figures") for part in report["parts"].values())
    profile, *others = report["parts"]["profile-janus-pro-1b"]["profiles"]
    assert [other["route"] for other in others] == ["model", "fused", "fused"]
    assert 5 <= len(profile["profile"]) <= 10 and profile["nodes"] > 50
    assert "left for the next call: engine-bitwise" in capsys.readouterr().out


def test_a_call_is_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def run(parts: Any, *_: Any, only: Any, **options: Any) -> Any:
        seen.update(only=only, all=[part.name for part in parts])
        return {"parts": {}, "left": []}

    monkeypatch.setattr(check, "run_parts", run)
    assert main(["--device", "cpu", "--tiny", "--call", "llama", "--call", "profile"], "") == 0
    steps = [f"engine-step-janus-pro-{size}-24" for size in ("1b", "7b")]
    assert seen["only"] == [*steps, "profile-janus-pro-1b", "profile-janus-pro-7b"]
    assert {"canvas", "copy", *seen["only"]} < set(seen["all"])
