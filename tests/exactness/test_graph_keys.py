"""Which runs share graphs: keys, results; runs that are interrupted, nested or concurrent."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from threading import Thread
from typing import Any
from weakref import ref

import pytest
import torch

from mmaccel import (
    CausalLMWindow,
    Frames,
    Jacobi,
    Noise,
    SamplingParams,
    SpeculativeJacobi,
    UnsupportedModelError,
)
from mmaccel.pipelines.hosts.runner.cuda_graphs import GraphCache
from mmaccel.policies import Policy
from mmaccel.results import Generation
from mmaccel.samplers.window import rows
from mmaccel.samplers.window.run import WindowRun
from mmaccel.samplers.window.step_runner import measure
from mmaccel.samplers.window.steps import static_parts, static_tensors
from tests.exactness.test_graph_reuse import (
    CALLS,
    FREE,
    GRID,
    JACOBI,
    Call,
    assert_like,
    check,
    decode,
)
from tests.fixtures.graph_replay import Replay, Tried
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import make_prompt


@pytest.fixture(scope="module")
def model() -> Any:
    return build_lm("llama")


KEYS: dict[str, tuple[Policy, Call]] = {
    "policy": (Jacobi(window=5), CALLS[0]),
    "another policy": (SpeculativeJacobi(window=6), CALLS[0]),
    "drafts": (Jacobi(window=6, drafts="left"), CALLS[0]),
    "temperature": (JACOBI, replace(CALLS[0], params={"temperature": 0.5})),
    "top_k": (JACOBI, replace(CALLS[0], params={"top_k": 3})),
    "guidance": (JACOBI, replace(CALLS[0], params={"guidance_scale": 3.0})),
    "branches": (JACOBI, replace(CALLS[0], params={"guidance_scale": 1.0})),
    "rows": (JACOBI, replace(CALLS[0], rows=((5,),), seeds=(3,))),
    "layout": (JACOBI, replace(CALLS[0], layout=replace(GRID, row_end=None))),
    "stop tokens": (JACOBI, replace(CALLS[0], stops=(9, 17))),
    "a long prompt": (JACOBI, replace(CALLS[0], rows=((5,), (7, 8) * 33), length=20)),
}


@pytest.fixture
def cache(model: Any) -> GraphCache:
    """With the graphs of one call."""
    cache = GraphCache()
    decode(JACOBI, CALLS[0], cache, model)
    return cache


@pytest.mark.parametrize(("policy", "call"), KEYS.values(), ids=KEYS)
def test_another_key_is_captured_anew(
    policy: Policy, call: Call, cache: GraphCache, model: Any
) -> None:
    check(call, cache, model, 1, policy)
    assert len(cache) == 2
    check(CALLS[1], cache, model, 0)  # the first key is still there


@pytest.mark.slow
def test_tables_of_a_layout_live_as_long_as_the_graphs_that_read_them(model: Any) -> None:
    """A graph reads a table of `Frames` by its address, and equal layouts of later calls come and
    go. The records are put out of the way, since they hold tensors as no graph does.
    """
    cache, tables = GraphCache(), []

    def call(n_captures: int) -> None:
        frames = Frames(((0, 20), (10, 39)), 40, ends=(39,))
        made = decode(JACOBI, replace(CALLS[0], layout=frames), cache, model)
        assert made.stats.captures == n_captures
        tables.append(ref(vars(frames)["_tables"][torch.device("cpu")]))
        for n in range(9):  # more than are kept for layouts that nothing holds
            Frames(((n, n + 1),), 40).allowed(torch.zeros(1, 1, dtype=torch.int64))

    call(1)
    call(0)
    (entry,) = cache._entries.values()
    entry.graphs = dict.fromkeys(entry.graphs, lambda: None)
    entry.state.clear()
    gc.collect()
    assert tables[0]() is not None
    del entry
    cache.clear()
    gc.collect()
    assert tables[0]() is None


def look(*given: Any) -> Any:
    float(torch.zeros(()))


@pytest.mark.parametrize("place", ["model", "acceptance", ""])
def test_a_pass_that_synchronises_is_found_before_the_capture(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on eagerly, with the same tokens, although the pass was half done."""
    policy, own = JACOBI, build_lm("llama")
    plain = decode(policy, FREE, None, own)
    if place == "model":
        own.model.layers[1].register_forward_hook(look)
    elif place:
        accept = rows.accept_prefix

        def accept_and_look(*given: Any, **options: Any) -> None:
            accept(*given, **options)  # the tokens of the pass are generated
            look()

        monkeypatch.setattr(rows, "accept_prefix", accept_and_look)
    runners = [Tried(), Tried(cache=GraphCache()), Tried(cache=GraphCache())]
    for runner in runners:
        made = decode(policy, FREE, None, own, runner=runner)
        assert made.tokens.equal(plain.tokens) and made.passes.equal(plain.passes)
        assert made.stats.accepted == plain.stats.accepted
        assert made.stats.runner == ("eager" if place else "cuda graphs")
        assert ("synchroniz" in made.stats.runner_reason) == bool(place)
        assert made.stats.captures == (0 if place else 1)
    # without a key always, with one until a trial of the model and the policy went well
    assert [runner.trials for runner in runners] == [1, 1, int(bool(place))]
    strict = Tried()
    strict.falls_back = False
    if place:
        with pytest.raises(UnsupportedModelError, match="never synchronise with the host"):
            decode(policy, FREE, None, own, runner=strict)


@pytest.mark.parametrize(
    "change", [{"params": {"top_k": 5}}, {"params": {"guidance_scale": 2.0}}, {"layout": GRID}]
)
def test_a_pass_of_other_operations_is_tried_again(change: dict[str, Any]) -> None:
    """What did not synchronise without filters may do so with them; numbers change nothing."""
    policy, own, trials = JACOBI, build_lm("llama"), []
    warmer = {"params": {"temperature": 0.5, **change.get("params", {})}}
    for call in ({}, {"length": 12}, change, change | warmer):
        runner = Tried(cache=GraphCache())
        decode(policy, replace(FREE, **call), None, own, runner=runner)
        trials.append(runner.trials)
    assert trials == [1, 0, 1, 0]


def test_a_call_with_a_callback_has_another_key(model: Any) -> None:
    """Counting is part of the graph without a callback, and outside it with one."""
    cache = GraphCache()
    for on_step, captures in ((None, 1), (print_nothing, 1), (None, 0), (print_nothing, 0)):
        made = decode(JACOBI, CALLS[0], cache, model, on_step)
        assert_like(made, decode(JACOBI, CALLS[0], None, model))
        assert made.stats.captures == captures


def print_nothing(progress: Any) -> None:
    """A callback."""


def test_later_calls_change_no_result_and_no_argument(model: Any) -> None:
    cache, policy = GraphCache(), JACOBI
    prompt = make_prompt([[5, 9, 11, 2], [7]], stop_tokens=torch.tensor([9]))
    noise, params = Noise.from_seed([3, 4], 2), SamplingParams()
    window = CausalLMWindow(model)
    window.setup.runner = Replay(1, cache)
    first = policy.sample(window, prompt, 28, params=params, noise=noise)
    mine = [first.tokens, first.lengths, first.passes, prompt.tokens, prompt.lengths]
    mine += [prompt.stop_tokens, noise.seeds, noise.items]
    before, accepted = [tensor.clone() for tensor in mine], list(first.stats.accepted)
    call = replace(CALLS[1], length=28, stops=(12,), layout=None)
    assert decode(policy, call, cache, model).stats.captures == 0
    assert all(tensor.equal(old) for tensor, old in zip(mine, before, strict=True))
    assert first.stats.accepted == accepted and first.stats.captures == 1


class Stop(Exception):
    """Raised by a callback."""


@pytest.mark.parametrize("kind", [Stop, KeyboardInterrupt])
def test_an_interrupted_run_leaves_nothing(kind: type[BaseException], model: Any) -> None:
    cache, policy = GraphCache(), SpeculativeJacobi(window=5)
    calls = 0

    def on_step(progress: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == limit:
            raise kind

    limit = 0
    decode(policy, CALLS[0], cache, model, on_step)
    for limit, n in ((3, 1), (6, 1)):  # with cached graphs, and before there is one
        calls = 0
        with pytest.raises(kind):
            decode(policy, CALLS[1], cache, model, on_step)
        assert len(cache) == 0
        limit = 0
        check(CALLS[2], cache, model, n, policy, on_step=on_step)


def test_a_run_within_a_run_has_tensors_of_its_own(model: Any) -> None:
    cache, policy, inner, depth = GraphCache(), JACOBI, [], 0
    plain = [decode(policy, call, None, model) for call in CALLS]

    def on_step(progress: Any) -> None:
        nonlocal depth
        if progress.passes == 4 and depth < 2:
            depth += 1
            inner.append((depth, decode(policy, CALLS[depth], cache, model, on_step)))
            depth -= 1

    for _ in range(2):
        assert_like(decode(policy, CALLS[0], cache, model, on_step), plain[0])
        assert [which for which, _ in inner] == [2, 1] and len(cache) == 1
        for which, made in inner:
            assert_like(made, plain[which])
        inner.clear()


def test_two_threads_share_nothing(model: Any) -> None:
    """Both use the same key; its graphs belong to one thread at a time."""
    cache, policy = GraphCache(), JACOBI
    decode(policy, CALLS[0], cache, model)
    made: dict[int, list[Generation]] = {0: [], 1: []}

    def work(which: int) -> None:
        for _ in range(3):
            made[which].append(decode(policy, CALLS[1 + which], cache, model))

    threads = [Thread(target=work, args=(which,)) for which in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for which, runs in made.items():
        plain = decode(policy, CALLS[1 + which], None, model)
        assert len(runs) == 3
        for run in runs:
            assert_like(run, plain)
    assert len(cache) == 1


def _move(model: Any) -> None:
    head = model.lm_head
    head.weight = torch.nn.Parameter(head.weight.detach().clone())


def _attend_otherwise(model: Any) -> None:
    model.config._attn_implementation = "eager"


@pytest.mark.parametrize("change", [_move, _attend_otherwise])
def test_a_model_that_moved_is_captured_anew(change: Any) -> None:
    """Its graphs are dropped or have another key; another model's stay."""
    cache, model, other = GraphCache(), build_lm("llama"), build_lm("qwen3")
    decode(JACOBI, CALLS[0], cache, other)
    decode(JACOBI, CALLS[0], cache, model)
    change(model)
    check(CALLS[1], cache, model, 1)
    assert len(cache) == 2
    check(CALLS[1], cache, other, 0)


def test_numbers_of_parameters_may_change() -> None:
    """A graph reads them anew: no capture, and the tokens of the new numbers."""
    cache, model = GraphCache(), build_lm("llama")
    first = decode(JACOBI, CALLS[0], cache, model)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    assert not check(CALLS[0], cache, model, 0).tokens.equal(first.tokens)


@contextmanager
def changed(setting: str, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another setting of torch."""
    if setting == "inference":
        with torch.inference_mode():
            yield
        return
    if setting == "kernels":
        patch.setenv("MMACCEL_KERNELS", "torch")
        yield
        return
    products: Any = torch.backends.mkldnn.matmul
    before = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    try:
        if setting == "dtype":
            torch.set_default_dtype(torch.float64)
        elif setting == "precision":
            torch.set_float32_matmul_precision("high")
        else:  # after which torch.get_float32_matmul_precision raises
            products.fp32_precision = "tf32"
        yield
    finally:
        products.fp32_precision = "ieee"
        torch.set_default_dtype(before[0])
        torch.set_float32_matmul_precision(before[1])


@pytest.mark.parametrize("setting", ["kernels", "dtype", "inference", "precision", "backends"])
def test_another_setting_of_torch_is_captured_anew(
    setting: str, cache: GraphCache, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with changed(setting, monkeypatch):
        made = decode(JACOBI, CALLS[1], cache, model)
    assert made.stats.captures == 1 and len(cache) == 2
    if setting == "backends":
        assert (made.stats.exactness, made.stats.dtype) == ("up to rounding", "tf32")


def test_two_keys_are_cached(model: Any) -> None:
    cache = GraphCache()

    def captures(*windows: int) -> list[int]:
        runs = [decode(Jacobi(window=w), CALLS[0], cache, model) for w in windows]
        return [run.stats.captures for run in runs]

    assert captures(4, 5, 4, 5) == [1, 1, 0, 0]
    assert captures(6, 5, 4) == [1, 0, 1] and len(cache) == 2  # 4 was the oldest
    assert cache.clear() and not cache.clear() and len(cache) == 0
    assert captures(4, 4) == [1, 0]


def test_dropped_graphs_are_freed(model: Any) -> None:
    """By `clear`, and with the cache itself, without a garbage collection."""
    for drop in (GraphCache.clear, lambda cache: None):
        cache = GraphCache()
        decode(JACOBI, CALLS[0], cache, model)
        (entry,) = cache._entries.values()
        tokens = ref(entry.inputs["rows.tokens"])
        drop(cache)
        del entry, cache
        assert tokens() is None


def test_a_run_that_ends_after_a_clear_is_not_cached(model: Any) -> None:
    cache = GraphCache()

    def on_step(progress: Any) -> None:
        if progress.passes == 3:
            cache.clear()

    decode(JACOBI, CALLS[0], cache, model, on_step)
    assert len(cache) == 0


def test_a_cached_kv_cache_is_emptied(cache: GraphCache, model: Any) -> None:
    """Positions after a row's last one are masked; NaN would come through a mask."""
    (entry,) = cache._entries.values()
    assert entry.model is not None
    for layer in entry.model["caches"].layers:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    made = check(CALLS[1], cache, model, 0)
    assert made.stats.dtype == "float32"  # of the captured passes


def test_policies_and_layouts_that_may_change_are_not_cached(model: Any) -> None:
    class Mutable:
        exactness, is_capturable, drafts = "bitwise", True, "left"
        tree = None
        needs_rows = False
        freezes_noise = True
        sample, decode = Jacobi.sample, Jacobi.decode
        draft_source = Jacobi.draft_source
        window = 6

    cache = GraphCache()
    made = decode(Mutable(), CALLS[0], cache, model)  # type: ignore[arg-type]
    assert len(cache) == 0 and made.stats.captures == 1


def test_copies_of_a_cache_are_empty(cache: GraphCache) -> None:
    for copied in (deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert len(copied) == 0 and copied.size == cache.size


def test_every_tensor_that_outlives_a_pass_is_declared(model: Any) -> None:
    """A tensor of a run that is no static input would be another one in the next run."""
    prompt = make_prompt([[5, 9], [7]], stop_tokens=torch.tensor([9]), layout=GRID)
    run = WindowRun(
        JACOBI, CausalLMWindow(model), prompt, 28, params=SamplingParams(),
        noise=Noise.from_seed(0, 2),
    )  # fmt: skip
    run.begin()
    parts = {**static_parts(run), "noise": run.noise}
    found = {
        f"{owner}.{name}"
        for owner, part in parts.items()
        for name, value in vars(part).items()
        if isinstance(value, torch.Tensor)
    }
    every_pass = {"rows.slots"}  # set by `move_window` in every step
    declared = static_tensors(run).keys()
    assert found - every_pass == declared - {"noise.schedule"}


def test_capacity_is_rounded_up_for_cached_graphs_alone() -> None:
    prompt = make_prompt([[1] * 70, [2]])
    assert measure(prompt, 30) == (70, 30, 99)
    assert measure(prompt, 30, rounded=True) == (128, 64, 191)
    assert measure(prompt, 30, rounded=True, most=96) == (128, 64, 99)  # refused by the model
    assert measure(prompt, 20, rounded=True, most=96) == (128, 64, 96)
