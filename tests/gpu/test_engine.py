"""The engine's parts of the check on GPUs, on a processor: tiny models, recorded steps, a clock
that moves by known amounts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import bitwise
from benchmarks.gpu.bitwise import Case, check_bitwise, compare, find_mistake, tiny_llama
from benchmarks.gpu.canvas import POLICIES, measure_canvas
from benchmarks.gpu.check import engine_parts
from benchmarks.gpu.models import SIZES, Size, build, key_bytes, open_window, sketch
from benchmarks.gpu.models import weight_bytes as bytes_of
from benchmarks.gpu.parts import CheckError
from benchmarks.gpu.scenes import measure_scenes
from benchmarks.gpu.steps import Enough, Stopwatch, measure_steps, time_step
from benchmarks.route_runs import Piece, Routes, Way
from mmaccel import Autoregressive, CausalLMWindow, Jacobi, SpeculativeJacobi, TextToImage
from mmaccel.pipelines.runner.cuda_graphs import GraphCache
from mmaccel.pipelines.runner.engine import Engine
from mmaccel.results import Stats
from mmaccel.samplers.window.step_runner import EagerRunner
from tests.fixtures.graph_replay import Replay
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.tiny_model import masked_beside_plain
from tests.fixtures.toy_models import make_prompt

CPU = torch.device("cpu")
with torch.device("meta"):  # torch notes at the first use which functions make tensors: the real
    torch.empty(0)  # ones, not those that conftest puts in their place
SMALL = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, vocab_size=128, bos_token_id=1,
    pad_token_id=0,
)  # fmt: skip


def shrink(size: Size) -> Size:
    codes = None if size.codes is None else range(4, 100)
    return replace(size, config=size.config | SMALL, codes=codes)


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
    assert {"model.rotary_emb.inv_freq"} <= set(dict(model.named_buffers()))
    head = model.get_output_embeddings().weight
    assert 0.018 < float(head.detach().std()) < 0.022
    window = open_window(model, small)
    assert window.vocab_size == (128 if small.codes is None else 96)
    if small.codes is not None:
        window.begin(make_prompt([[1, 2]]))  # type: ignore[attr-defined]
    window.reserve(1, 8)
    logits = window.forward(torch.tensor([[1, 2]]), torch.tensor([0]))
    assert bool(logits.isfinite().all()) and float(logits.std()) > 0.01


class Time:
    """Seconds that move when something is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Ticking(Replay):
    """A replay takes 2 ms and a tenth for every token; all other passes take 1000 s."""

    def __init__(self, clock: Time, surplus: float = 0.0) -> None:
        super().__init__(4)
        self.clock, self.surplus = clock, surplus

    def run_step(self, key: Hashable | None, step: Callable[[], None]) -> bool:
        is_usual = super().run_step(key, step)
        self.clock.now += 0.002 + 0.0001 * int(str(key)) + self.surplus if is_usual else 1000.0
        return is_usual


def test_the_watch_reads_replays_alone() -> None:
    clock = Time()
    watch = Stopwatch(Ticking(clock), 5, clock)
    watch.load(None, {})
    assert (watch.name, watch.is_static, watch.sync_every) == ("cuda graphs", True, 4)
    total = torch.zeros(())
    with pytest.raises(Enough):
        while True:
            watch.run_step(8, lambda: total.add_(1))
    watch.stop()
    assert watch.timed == 5 and watch.seconds == pytest.approx(5 * 0.0028)
    assert int(total) == 2 + 1 + 5  # aside, the record, the first replay, and the timed ones


def test_steps_of_a_model_and_their_ratios() -> None:
    clock = Time()
    model = build_lm("llama", max_position_embeddings=256)

    def tick(*_: object) -> None:
        clock.now += 0.010

    model.register_forward_hook(tick)
    window, surplus = CausalLMWindow(model), iter([0.0, 0.0, 0.0, 0.0, 0.001, 0.001])
    made = measure_steps(
        "tiny", model, window, 0.25, clock, contexts=(96, 160), windows=(4, 8),
        make_runner=lambda *_: Ticking(clock, next(surplus)), n_passes=6,
    )  # fmt: skip
    first, second = made["steps"]
    weights = 4 * (2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32 + 40 * 32)
    assert first["bytes"] == weights + 4 * 2 * 2 * 32 * 2 * 96
    assert second["bytes"] - first["bytes"] == 4 * 2 * 2 * 32 * 2 * 64
    assert first["floor_ms"] == pytest.approx(first["bytes"] / 250_000)  # 0.25 GB/s
    for row in made["steps"]:
        assert row["step_ms"] == pytest.approx(2.1)
        assert row["generate_ms"] == pytest.approx(10.0)
    assert first["windows_ms"] == pytest.approx({"4": 2.4, "8": 2.8})
    assert second["windows_ms"] == pytest.approx({"4": 3.4, "8": 3.8})
    assert made["figures"] == pytest.approx({  # the worse context's
        "step_share_of_floor": first["floor_ms"] / 2.1, "eager_step_ratio": 10 / 2.1,
        "window_4_step_ratio": 3.4 / 2.1, "window_8_step_ratio": 3.8 / 2.1,
    })  # fmt: skip
    assert window.runner is None


def test_every_pass_sees_the_context_and_no_more() -> None:
    clock, model = Time(), build_lm("llama")
    window, sizes = CausalLMWindow(model), []
    reserve = window.reserve
    window.reserve = lambda rows, size: (sizes.append((rows, size)), reserve(rows, size))[1]  # type: ignore[method-assign, assignment]
    for policy, width in ((Autoregressive(), 1), (Jacobi(4), 4)):
        time_step(window, policy, width, 90, clock, lambda *_: Ticking(clock), 4)
    assert sizes == [(2, 90), (2, 90)]


def test_a_run_too_short_to_time_is_an_error() -> None:
    clock, window = Time(), CausalLMWindow(build_lm("llama"))
    with pytest.raises(CheckError, match="at 8 positions: expected 4 passes to time or more"):
        time_step(window, Autoregressive(), 1, 8, clock, lambda *_: Ticking(clock))
    assert window.runner is None


def choose(cuda_graphs: Any, sync_every: int, *_: Any, cache: GraphCache | None = None) -> Any:
    return EagerRunner(sync_every) if cuda_graphs is False else Replay(sync_every, cache)


def llama_case() -> Case:
    def prompt(rows: int, guided: bool) -> Any:
        lists = [[5, 9, 11][: 1 + r % 3] for r in range(rows)]
        return make_prompt(lists + lists[::-1] * guided, 1 + guided)

    return Case("tiny", CausalLMWindow(tiny_llama(CPU)), prompt)


def test_the_same_tokens_captured_and_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [llama_case()]
    monkeypatch.setattr(bitwise, "make_cases", lambda device: cases)
    monkeypatch.setattr(Engine, "check", lambda *_: None)
    shared = [True]

    def runner(self: Engine, *_: Any) -> Any:
        return choose(self.cuda_graphs, self.sync_every, cache=self.cache if shared[0] else None)

    monkeypatch.setattr(Engine, "runner", runner)
    batches = ((1, 1), (3, 4))
    both = {"policies": (Jacobi(4), SpeculativeJacobi(4)), "batches": batches, "length": 14}
    one = both | {"policies": (Jacobi(4),)}
    # 2 policies, 2 scales and 2 batches; attached 2 policies, 2 rhythms, guided and not
    assert check_bitwise(CPU, choose, **both) == {"passed": 8 + 8}
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
    case = llama_case()
    turns = iter(range(100))
    case.prompt = lambda rows, guided: make_prompt([[5 + next(turns)]] * rows)
    runs = list(compare(case, choose, [Jacobi(4)], [(1, 1)], [1.0], 14))
    assert len(runs) == 1 and runs[0][1].endswith("of 14 tokens differ")
    tokens = torch.tensor([[1, 2]])
    assert (
        find_mistake(tokens, tokens + torch.tensor([0, 1]), "cuda graphs") == "1 of 2 tokens differ"
    )
    assert "expected tokens [1, 2], received [1, 1]" in find_mistake(
        tokens, tokens[:, :1], "cuda graphs"
    )


def test_every_model_has_prompts_for_every_batch() -> None:
    for case in bitwise.make_cases(CPU):
        for rows, guided in ((1, False), (3, True), (8, True)):
            prompt = case.prompt(rows, guided)
            assert (prompt.batch, prompt.branches) == (rows, 1 + guided)
            assert int(prompt.tokens.max()) < case.window.model.config.vocab_size


class FakeRoutes:
    """Ways that take known seconds; a first run takes 1000."""

    pipe = SimpleNamespace(image_model=SimpleNamespace(examples=("a", "b", "c")))

    def __init__(self, runner: str = "cuda graphs") -> None:
        self.runner, self.seen, self.captions = runner, set[Way](), set[tuple[str, ...]]()

    def run(self, way: Way, captions: Any, seeds: Any) -> Piece:
        assert len(captions) == len(seeds) == way.batch_size
        self.captions.add(tuple(captions))
        plain = 8.0 * way.guidance * way.batch_size**0.5
        share = {None: 1.0, Jacobi(32): 0.125, Jacobi("adaptive"): 0.1}[way.policy]
        seconds = plain * share * (0.5 if way.guidance == 2.0 else 1.0) if way.policy else plain
        captures = 0
        if way not in self.seen:
            self.seen.add(way)
            seconds, captures = 1000.0, 3
        stats = Stats(tokens=256, row_passes=64, runner=self.runner, runner_reason="x")
        stats.captures = captures
        return Piece(torch.zeros(1), stats if way.policy else None, seconds)


def test_images_end_to_end() -> None:
    routes: Any = FakeRoutes()
    made = measure_scenes(CPU, routes, batches=(1, 4))
    assert len(made["scenes"]) == 2 * 2 * 3 and ("a", "b", "c", "a") in routes.captions
    own = {(r["batch"], r["guidance"], r["policy"]): r for r in made["scenes"]}
    assert own[1, 2.0, None]["seconds"] == 16 and own[4, 1.0, None]["images_per_s"] == 0.25
    single = own[1, 1.0, repr(Jacobi(32))]
    assert single["speed_up"] == 8 and single["tokens_per_pass"] == 4
    assert (single["first_seconds"], single["captures"]) == (1000, [3, 0, 0])
    assert own[4, 1.0, None]["first_seconds"] == 250 and own[4, 1.0, None]["captures"] == []
    assert made["figures"] == pytest.approx({
        "product": 10.0,  # batch 1, the faster window, the worse of the two scales (10 and 20)
        "scenes_images_per_s": 4 / 1.6,  # batch 4: 8 * 2 * 0.1 = 1.6 s for four
    })  # fmt: skip


def test_images_that_were_not_captured_are_no_result() -> None:
    routes: Any = FakeRoutes("eager")
    with pytest.raises(CheckError, match="2 of 2 were not captured") as caught:
        measure_scenes(CPU, routes, batches=(1,), scales=(1.0,))
    assert len(caught.value.found["scenes"]) == 3


def test_images_of_the_real_model() -> None:
    routes = Routes("scenes", length=4)
    with pytest.raises(CheckError, match="not captured") as caught:
        measure_scenes(CPU, routes, batches=(2,), scales=(1.0,), repeats=1)
    rows = caught.value.found["scenes"]
    assert [row["policy"] is None for row in rows] == [True, False, False]
    assert all(row["seconds"] > 0 for row in rows) and "cpu" in rows[1]["reason"]


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


def test_parts_have_names_of_their_own() -> None:
    names = [part.name for part in engine_parts()]
    assert names[:3] == ["engine-bitwise", "scenes", "canvas"]
    assert len(set(names)) == 3 + len(SIZES)
    assert "engine-step-janus-pro-1b" in names
