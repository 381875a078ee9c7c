"""Times of decoding steps at a fixed context, and the memory traffic below which no step can go.

A step is a pass of an ordinary run: forward, sampling parameters, noise, acceptance, pointers and
stop test, and the host's reads of them. A `Stopwatch` stands between the run and its step runner.
It starts when every graph is captured and ten passes are over, and takes the time of groups of
passes between two reads of the host; the median group counts.

All runs of a context have the same cache and the same prompt. How far a window gets in the timed
passes depends on its tokens, so the positions that were there are recorded, the floor is made of
them, and a window is compared with a step of one token that was timed at the window's own
positions. What was not captured, or ran the model's own attention where a GPU has the kernel, is
recorded with its reason and fills no figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.kernels import copy_bandwidth
from benchmarks.gpu.models import Size, build, key_bytes, open_window, shrink, weight_bytes
from benchmarks.gpu.parts import CheckError, reason_of
from mmaccel.contracts import Prompt
from mmaccel.pipelines.hosts.causal_lm.image_vocabulary import ImageTokenWindow
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.runner.engine import Engine
from mmaccel.policies import Policy
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.autoregressive import Autoregressive
from mmaccel.samplers.window.jacobi import Jacobi
from mmaccel.samplers.window.step_runner import (
    GraphKey,
    Once,
    StaticBuffers,
    StepRunner,
)

Clock = Callable[[], float]
Row = dict[str, Any]
Count = tuple[int, int]
"""Passes that are timed, and passes before them."""

WINDOWS = (32, 64)
CONTEXTS = (1024, 4096)
_COUNT, _FEW = (64, 10), (8, 2)
_FEWEST = 4
_SYNC_EVERY = 4
_N_LOST = 1 + 2 * _SYNC_EVERY  # passes before the first replay: the first, some aside, the record
_LONGEST = 10  # nodes of a profile
_FILTERS = SamplingParams(guidance_scale=5.0)


class StaticEagerRunner(StepRunner):
    """Runs steps as Python on static buffers: what a captured step does, where there is no GPU."""

    is_static = True

    def load(self, key: GraphKey | None, inputs: dict[str, Tensor]) -> StaticBuffers:
        return StaticBuffers({name: value.clone() for name, value in inputs.items()})


def make_runner(
    window: Any, prompt: Prompt, policy: Policy, params: SamplingParams, sync_every: int
) -> StepRunner:
    """A runner that captures passes where there is a GPU, and raises where that cannot be; on a
    CPU one that runs the same passes as Python.
    """
    if window.device.type != "cuda":
        return StaticEagerRunner(sync_every, "CUDA graphs need a CUDA device")
    return Engine(True, sync_every).runner(window, prompt, policy, params)


class Enough(Exception):
    """All passes that were wanted are timed."""


class Stopwatch:
    """Takes the time of the passes that a runner replays, in the place of its `run_step`.

    Args:
        runner: carries out the passes; what is timed serves no later run.
        count: how many to time at most, in groups of the runner's `sync_every`, after which
            `Enough` is raised, and how many are replayed before them.
        clock: seconds, of a device that has finished its work.

    Attributes:
        marks: the clock before each group and after the last one.
        last: key and step of the last call, which can be run again, and the passes of it.
        generated: tokens of a row at each mark, on average; 0 where the runner has no static
            buffers.
    """

    def __init__(self, runner: Any, count: Count, clock: Clock) -> None:
        self.clock, self.sync_every = clock, runner.sync_every
        self.n_groups, self.n_warm = -(-count[0] // runner.sync_every), count[1]
        self.marks: list[float] = []
        self.generated: list[float] = []
        self.last: tuple[Hashable | None, Callable[[], None], int] = (None, lambda: None, 1)
        self._buffers: StaticBuffers | None = None
        self._n_calls = self._n_usual = 0
        self._runner, self._load, self._run_step = runner, runner.load, runner.run_step
        runner.load, runner.run_step, runner.has_cache = self.load, self.run_step, False

    def release(self) -> None:
        """Give the runner its own methods back, and end its run: graphs and their memory go."""
        del self._runner.load, self._runner.run_step
        self._runner.finish()

    @property
    def timed(self) -> int:
        return max(len(self.marks) - 1, 0) * self.sync_every

    @property
    def seconds(self) -> float:
        groups = [after - before for before, after in zip(self.marks, self.marks[1:])]
        return median(groups) / self.sync_every

    def load(self, key: GraphKey | None, inputs: dict[str, Tensor]) -> StaticBuffers | None:
        self.marks, self.generated, self._n_calls, self._n_usual = [], [], 0, 0
        self._buffers = self._load(key, inputs)
        return self._buffers

    def run_step(self, key: Hashable | None, step: Callable[[], None]) -> bool:
        if isinstance(key, Once) and key.kind == "prompt":
            return bool(self._run_step(key, step))
        # the first pass of a run is alone, and then the host reads after every group
        if self._n_usual >= self.n_warm + 1 and (self._n_calls - 1) % self.sync_every == 0:
            self.mark()
        is_usual = bool(self._run_step(key, step))
        n_passes = 1
        if isinstance(key, tuple) and not isinstance(key, Once):
            n_passes = int(key[1])  # (width, passes) where a group of passes is one graph
        self.last = key, step, n_passes
        self._n_calls += n_passes
        self._n_usual += n_passes * is_usual
        return is_usual

    def repeat(self) -> None:
        """The last call once more, without the clock."""
        self._run_step(*self.last[:2])

    def mark(self) -> None:
        """A group of passes ends, and another one begins."""
        inputs = {} if self._buffers is None else self._buffers.inputs
        count = inputs.get("rows.n_generated")
        self.generated.append(0.0 if count is None else float(count.float().mean()))
        self.marks.append(self.clock())
        if len(self.marks) > self.n_groups:
            raise Enough


def device_clock(device: torch.device) -> Clock:
    """Seconds once the device has done all it was given."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def time_step(
    window: CausalLMWindow,
    policy: Policy,
    context: int,
    *,
    room: int | None = None,
    count: Count = _COUNT,
    profile: int = 0,
) -> Row:
    """A captured pass of one image with guidance, two rows: `ms` of a pass, `positions` that it
    sees on average, `tokens_per_pass`, `passes` timed, `runner` and `reason`, `attention` (why the
    model's own ran, or ""), `nodes`, and `profile`, the device's longest nodes.

    `room` are positions of the cache; None: as many as the passes may need. CheckError: the run
    ended before four passes were timed.
    """
    width = getattr(policy, "window", 1)
    length = tokens_wanted(width, count) if room is None else room - context
    ids = torch.ones((2, context), dtype=torch.int64, device=window.device)
    prompt = Prompt(ids, torch.full((2,), context, device=window.device), 2)
    if isinstance(window, ImageTokenWindow):
        window.begin(prompt)
    noise = Noise.from_seed(0, 1, window.device)
    window.setup.runner = runner = make_runner(window, prompt, policy, _FILTERS, _SYNC_EVERY)
    watch = Stopwatch(runner, count, device_clock(window.device))
    try:
        with suppress(Enough):
            policy.sample(window, prompt, length, params=_FILTERS, noise=noise)
            if watch.marks:
                watch.mark()  # after the last pass of a run that came to its end
        if watch.timed < _FEWEST:
            raise CheckError(
                f"{policy!r} at {context} positions: expected {_FEWEST} passes to time or more, "
                f"received {watch.timed} before the end; take more room",
                {},
            )
        first, last = watch.generated[0], watch.generated[-1]
        return {
            "ms": 1000 * watch.seconds,
            "passes": watch.timed,
            "runner": runner.name,
            "reason": runner.reason,
            "attention": window.route.attention,
            "positions": context + (first + last) / 2 + width - 1,
            "tokens_per_pass": (last - first) / watch.timed,
        } | _profile(window.device, watch.repeat, profile, watch.last[2])
    finally:
        window.setup.runner = None
        watch.release()


def tokens_wanted(width: int, count: Count) -> int:
    """Tokens that so many passes of a window can generate at most."""
    return width * (_N_LOST + sum(count) + 3 * _SYNC_EVERY)


def _profile(device: torch.device, step: Callable[[], object], n_rows: int, n_passes: int) -> Row:
    """Nodes of a captured pass that a GPU's profiler sees in five more calls of so many passes, and
    the longest ones; a failure of the profiler is said and costs no timing.
    """
    from torch.profiler import ProfilerActivity, profile

    if device.type != "cuda":
        return {"nodes": None, "nodes_by": "no GPU", "profile": []}
    repeats = 5
    try:
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(repeats):
                step()
            torch.cuda.synchronize()
    except Exception as error:  # whatever the profiler raises
        return {"nodes": None, "nodes_by": reason_of(error)}
    found: dict[str, Row] = {}
    for event in profiled.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            row = found.setdefault(event.name, {"name": event.name, "count": 0.0, "ms": 0.0})
            row["count"] += 1 / repeats / n_passes
            row["ms"] += event.device_time_total / 1000 / repeats / n_passes
    longest = sorted(found.values(), key=lambda row: -row["ms"])[:n_rows]
    n_nodes = round(sum(row["count"] for row in found.values()))
    return {"nodes": n_nodes, "nodes_by": "profiler", "profile": longest}


def time_generate(model: Any, context: int, count: Count, *, static: bool = False) -> float:
    """Milliseconds of a step of transformers' own `generate`, two rows, sampled.

    Two plain rows, as Janus' own loop has them with guidance; the processor that other models use
    for guidance runs a second forward a step and would only be slower.
    """
    clock = device_clock(model.device)
    ids = torch.ones(2, context, dtype=torch.int64, device=model.device)
    # one length for all calls: a static cache of another length is compiled anew
    options: dict[str, Any] = {"cache_implementation": "static"} if static else {}
    times: list[float] = []

    def tick(tokens: Any, scores: Any, **_: Any) -> Tensor:
        times.append(clock())
        return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

    n_new = sum(count) + 1
    for _ in range(2):  # the first sets libraries up and compiles
        times.clear()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=n_new,
            min_new_tokens=n_new,
            stopping_criteria=[tick],
            **options,
        )
    steps = [after - before for before, after in zip(times, times[1:])]
    return 1000 * median(steps[count[1] :])


@torch.no_grad()
def measure_steps(
    size: Size, context: int, device: torch.device, tiny: bool = False
) -> dict[str, Any]:
    """Steps of a model at a context by each of its forwards, and of transformers' own loop, as a
    part of the report keeps them.
    """
    peak = copy_bandwidth(device, tiny)  # which the floor is made of
    count, windows = (_FEW, (4,)) if tiny else (_COUNT, WINDOWS)
    size = shrink(size) if tiny else size
    model = build(size, device)
    window = open_window(model, size)
    rows = [time_route(route, window, context, peak, windows, count) for route in routes_of(window)]
    own = time_generate(model, context, count)
    compiled, reason = None, "timed at the first context alone"  # each is compiled for itself
    if context == CONTEXTS[0]:
        try:
            compiled, reason = time_generate(model, context, count, static=True), ""
        except Exception as error:  # whatever its compiler raises
            reason = reason_of(error)
    for row in rows:
        row |= {"model": size.name, "generate_ms": own, "generate_ratio": own / row["step_ms"]}
        row |= {"compiled_ms": compiled, "compiled_reason": reason}
        row["compiled_ratio"] = compiled and compiled / row["step_ms"]
    return {"copy_gb_per_s": peak, "steps": rows, "figures": step_figures(rows)}


def step_figures(rows: list[Row]) -> dict[str, float]:
    """Those of the fastest forward; none where a step was not captured, or ran another attention
    than the kernel.
    """
    best = min(rows, key=lambda row: row["step_ms"])
    if best["fallbacks"]:
        return {}
    found = {
        "step_share_of_floor": best["share_of_floor"],
        "eager_step_ratio": best["generate_ratio"],
    }
    for width, ratio in best["window_ratios"].items():
        found[f"window_{width}_step_ratio"] = ratio
    if best["compiled_ratio"] is not None:
        found["compiled_step_ratio"] = best["compiled_ratio"]
    return found


def routes_of(window: Any) -> tuple[str, ...]:
    """The forwards that can be compared: the model's own and, where it serves the model, the fused
    decoder.
    """
    window.setup.fused = "auto"
    window.reserve(2, 8)
    return ("model", "fused") if window.route.name == "fused" else ("model",)


def time_route(
    route: str,
    window: Any,
    context: int,
    gb_per_s: float,
    windows: tuple[int, ...],
    count: Count,
) -> Row:
    """Steps of one forward at one context."""
    window.setup.fused = route == "fused"
    room = context + tokens_wanted(max(windows), count)
    run = partial(time_step, window, room=room, count=count)

    one = run(Autoregressive(), context)
    wide = {str(w): run(Jacobi(w), context) for w in windows}
    beside = {}
    for w, step in wide.items():
        drift = round(step["positions"] - int(w) + 1 - one["positions"])
        beside[w] = run(Autoregressive(), context + drift) if drift > 0 else one
    n_bytes = weight_bytes(window.model, window.vocab_size)
    n_bytes += key_bytes(window.model, 2, round(one["positions"]))
    floor = n_bytes / gb_per_s / 1e6
    steps = [one, *wide.values(), *beside.values()]
    why = {step[key] for step in steps for key in ("reason", "attention") if step[key]}
    return {
        "route": route,
        "context": context,
        "room": room,
        "bytes": n_bytes,
        "floor_ms": floor,
        "step_ms": one["ms"],
        "share_of_floor": floor / one["ms"],
        "step": one,
        "windows": wide,
        "beside": beside,
        "windows_ms": {w: step["ms"] for w, step in wide.items()},
        "window_ratios": {w: step["ms"] / beside[w]["ms"] for w, step in wide.items()},
        "nodes": one["nodes"],
        "runner": one["runner"],
        "reason": one["reason"],
        "attention": one["attention"] or "window_attention",
        "fallbacks": sorted(why),
    }


@torch.no_grad()
def profile_steps(size: Size, device: torch.device, tiny: bool = False) -> dict[str, Any]:
    """The nodes of a captured pass that take longest, of five replays, by forward and window."""
    size = shrink(size) if tiny else size
    window: Any = open_window(build(size, device), size)
    rows = []
    for route in routes_of(window):
        window.setup.fused = route == "fused"
        for policy in (Autoregressive(), Jacobi(4 if tiny else 32)):
            count = _FEW if tiny else (32, 2)
            step = time_step(window, policy, 24 if tiny else 1024, count=count, profile=_LONGEST)
            rows.append({"model": size.name, "route": route, "policy": repr(policy)} | step)
    return {"profiles": rows}
