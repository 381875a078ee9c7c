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
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.models import key_bytes, weight_bytes
from benchmarks.gpu.nodes import StaticEagerRunner, profile_step, record_step
from benchmarks.gpu.parts import CheckError
from mmaccel.contracts import Policy, Prompt, TokenModel
from mmaccel.kernels.device_errors import is_device_error
from mmaccel.pipelines.causal_lm.image_vocabulary import ImageTokenWindow
from mmaccel.pipelines.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.runner.engine import Engine
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.autoregressive import Autoregressive
from mmaccel.samplers.window.jacobi import Jacobi
from mmaccel.samplers.window.step_runner import GraphKey, Once, StaticBuffers, StepRunner

Clock = Callable[[], float]
_GENERATED = "buffer.n_generated"  # among a run's static inputs


class Enough(Exception):
    """All passes that were wanted are timed."""


class Stopwatch:
    """A `StepRunner` that takes the time of the passes that are replayed.

    Args:
        runner: carries out the passes.
        n_passes: how many to time at most, in groups of the runner's `sync_every`; the pass after
            them raises `Enough`.
        clock: seconds, of a device that has finished its work.
        n_warm: passes that are replayed before the first one that is timed.

    Attributes:
        marks: the clock before each group and after the last one.
        last: key and step of the last pass, which can be run again.
        generated: tokens of a row at the first mark and at the last one, on average; None where
            the runner has no static buffers.
    """

    captures = 0
    has_cache = False  # what is timed serves no later run

    def __init__(self, runner: StepRunner, n_passes: int, clock: Clock, n_warm: int = 0) -> None:
        self.runner, self.clock = runner, clock
        self.is_static, self.sync_every = runner.is_static, runner.sync_every
        self.n_groups, self.n_warm = -(-n_passes // self.sync_every), n_warm
        self.reason = runner.reason
        self.marks: list[float] = []
        self.last: tuple[Hashable | None, Callable[[], None]] | None = None
        self.generated: tuple[float, float] | None = None
        self._buffers: StaticBuffers | None = None
        self._n_calls = self._n_usual = 0

    @property
    def name(self) -> str:
        """What statistics call the runner inside."""
        return self.runner.name

    @property
    def timed(self) -> int:
        """Number of passes timed."""
        return max(len(self.marks) - 1, 0) * self.sync_every

    @property
    def seconds(self) -> float:
        """Of a pass: the median group's."""
        groups = [after - before for before, after in zip(self.marks, self.marks[1:])]
        return median(groups) / self.sync_every

    def load(self, key: GraphKey | None, inputs: dict[str, Tensor]) -> StaticBuffers | None:
        self.marks, self._n_calls, self._n_usual = [], 0, 0
        self._buffers = self.runner.load(key, inputs)
        return self._buffers

    def reserve(self, model: TokenModel, rows: int, positions: int) -> None:
        self.runner.reserve(model, rows, positions)

    def finish(self) -> None:
        self.runner.finish()

    def free_memory(self) -> bool:
        return self.runner.free_memory()

    def run_step(self, key: Hashable | None, step: Callable[[], None]) -> bool:
        """See `StepRunner.run_step`.

        Raises:
            Enough: as many passes as were wanted are timed.
        """
        if isinstance(key, Once) and key.kind == "prompt":
            return self.runner.run_step(key, step)
        # the first pass of a run is alone, and then the host reads after every group
        if self._n_usual >= self.n_warm + 1 and (self._n_calls - 1) % self.sync_every == 0:
            self._mark()
        is_usual = self.runner.run_step(key, step)
        self.reason, self.last = self.runner.reason, (key, step)
        self._n_calls += 1
        self._n_usual += is_usual
        return is_usual

    def stop(self) -> None:
        """After the last pass of a run that came to its end."""
        if self.marks:
            with suppress(Enough):
                self._mark()

    def _mark(self) -> None:
        count = self._count()
        self.marks.append(self.clock())
        if count is not None:
            self.generated = (count if len(self.marks) == 1 else self.generated[0], count)  # type: ignore[index]
        if len(self.marks) > self.n_groups:
            raise Enough

    def _count(self) -> float | None:
        if self._buffers is None or _GENERATED not in self._buffers.inputs:
            return None
        return float(self._buffers.inputs[_GENERATED].float().mean())


def device_clock(device: torch.device) -> Clock:
    """Seconds once the device has done all it was given."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


MakeRunner = Callable[[CausalLMWindow, Prompt, Policy, SamplingParams], StepRunner]
WINDOWS = (32, 64)
CONTEXTS = (1024, 4096)
N_PASSES, N_WARM = 64, 10
_FEWEST = 4
_N_LOST = 3  # passes before the first replay: the first, one aside, the record
_SYNC_EVERY = 4
_FILTERS = SamplingParams(guidance_scale=5.0)


def engine_runner(
    window: CausalLMWindow, prompt: Prompt, policy: Policy, params: SamplingParams
) -> StepRunner:
    """A runner that captures passes where there is a GPU, and raises where that cannot be; on a
    CPU one that runs the same passes as Python.
    """
    if window.device.type != "cuda":
        reason = f"the model on {window.device}; CUDA graphs need a CUDA device"
        return StaticEagerRunner(_SYNC_EVERY, reason)
    return Engine(True, _SYNC_EVERY).runner(window, prompt, policy, params)


def time_step(
    window: CausalLMWindow,
    policy: Policy,
    context: int,
    clock: Clock,
    *,
    room: int | None = None,
    make_runner: MakeRunner = engine_runner,
    n_passes: int = N_PASSES,
    n_warm: int = N_WARM,
    profile: int = 0,
) -> dict[str, Any]:
    """A captured pass of one image with guidance, two rows.

    Args:
        window: the model.
        policy: whose passes are timed.
        context: tokens of the prompt.
        clock, make_runner, n_passes, n_warm: what times, how passes are carried out, how many are
            timed and how many go before them.
        room: positions of the cache; None: as many as the passes may need.
        profile: number of the device's longest nodes to return; 0 counts them alone.

    Returns:
        `ms` of a pass, `positions` that it sees on average, `tokens_per_pass`, `passes` timed,
        `runner` and `reason`, `attention` (why the model's own ran, or ""), `nodes` and `nodes_by`
        ("profiler", or "recorded operations" on a CPU), and `profile` where it was asked for.

    Raises:
        CheckError: the run ended before four passes were timed.
    """
    width = getattr(policy, "window", 1)
    length = tokens_wanted(width, n_passes, n_warm) if room is None else room - context
    prompt = Prompt(
        torch.ones((2, context), dtype=torch.int64, device=window.device),
        torch.full((2,), context, device=window.device),
        2,
    )
    if isinstance(window, ImageTokenWindow):
        window.begin(prompt)
    noise = Noise.from_seed(0, 1, window.device)
    inner = make_runner(window, prompt, policy, _FILTERS)
    watch = Stopwatch(inner, n_passes, clock, n_warm)
    window.runner = watch
    try:
        with suppress(Enough):
            policy.sample(window, prompt, length, params=_FILTERS, noise=noise)
            watch.stop()
        if watch.timed < _FEWEST:
            raise CheckError(
                f"{policy!r} at {context} positions: expected {_FEWEST} passes to time or more, "
                f"received {watch.timed} before the end; take more room",
                {},
            )
        found = {
            "ms": 1000 * watch.seconds,
            "passes": watch.timed,
            "runner": inner.name,
            "reason": inner.reason,
            "attention": window.attention_reason,
        }
        first, last = watch.generated or (0.0, 0.0)
        found["positions"] = context + (first + last) / 2 + width - 1
        found["tokens_per_pass"] = (last - first) / watch.timed
        return found | _count_nodes(window, watch, profile)
    finally:
        window.runner = None
        watch.finish()  # graphs and their memory go


def tokens_wanted(width: int, n_passes: int = N_PASSES, n_warm: int = N_WARM) -> int:
    """Tokens that so many passes of a window can generate at most."""
    return width * (_N_LOST + n_warm + n_passes + 3 * _SYNC_EVERY)


def _count_nodes(window: CausalLMWindow, watch: Stopwatch, n_rows: int) -> dict[str, Any]:
    """Nodes of one more pass; a failure of the profiler is said and costs no timing."""
    assert watch.last is not None
    key, step = watch.last
    if window.device.type != "cuda":
        counted = record_step(step)
        found = {"nodes": sum(counted.values()), "nodes_by": "recorded operations"}
        most = [{"name": name, "count": n} for name, n in counted.most_common(n_rows)]
        return found | ({"profile": most} if n_rows else {})
    try:
        rows = profile_step(lambda: watch.runner.run_step(key, step))
    except Exception as error:  # whatever the profiler raises
        if is_device_error(error):
            raise
        return {"nodes": None, "nodes_by": f"{type(error).__name__}: {error}"[:200]}
    found = {"nodes": round(sum(row["count"] for row in rows)), "nodes_by": "profiler"}
    return found | ({"profile": rows[:n_rows]} if n_rows else {})


def time_generate(
    model: Any,
    context: int,
    clock: Clock,
    n_tokens: int = N_PASSES,
    n_warm: int = N_WARM,
    *,
    static: bool = False,
) -> float:
    """Milliseconds of a step of transformers' own `generate`, two rows, sampled.

    Two plain rows, as Janus' own loop has them with guidance; the processor that other models use
    for guidance runs a second forward a step and would only be slower.

    Args:
        model, context, clock: as in `time_step`.
        n_tokens, n_warm: steps timed, and steps before them.
        static: a static cache, with which transformers compiles the pass by itself on a GPU
            (`CompileConfig`'s defaults: "reduce-overhead", which replays CUDA graphs).
    """
    ids = torch.ones(2, context, dtype=torch.int64, device=model.device)
    # one length for all calls: a static cache of another length is compiled anew
    options: dict[str, Any] = {"cache_implementation": "static"} if static else {}
    times: list[float] = []

    def tick(tokens: Any, scores: Any, **_: Any) -> Tensor:
        times.append(clock())
        return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

    n_new = n_warm + n_tokens + 1
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
    return 1000 * median(steps[n_warm:])


def measure_steps(
    name: str,
    model: Any,
    window: CausalLMWindow,
    gb_per_s: float,
    clock: Clock,
    *,
    contexts: tuple[int, ...] = CONTEXTS,
    windows: tuple[int, ...] = WINDOWS,
    make_runner: MakeRunner = engine_runner,
    n_passes: int = N_PASSES,
    n_warm: int = N_WARM,
    compiled: bool = True,
) -> dict[str, Any]:
    """Steps of a model as a part of the report keeps them; figures are its worst.

    Args:
        name: of the model.
        model, window: the same, as transformers and as samplers see it.
        gb_per_s: measured bandwidth of a copy, which the floor is made of.
        clock: see `device_clock`.
        contexts: tokens of the prompt.
        windows, make_runner, n_passes, n_warm: see `time_step`.
        compiled: whether transformers' compiled loop is timed as well, at the first context.
    """
    rows: list[dict[str, Any]] = []
    count = {"n_passes": n_passes, "n_warm": n_warm}
    for context in contexts:
        room = context + tokens_wanted(max(windows, default=1), **count)
        rows += [
            _measure_route(
                route, window, context, room, gb_per_s, clock, windows, make_runner, count
            )
            for route in routes_of(window)
        ]
        own = time_generate(model, context, clock, n_passes, n_warm)
        ms, reason = None, "timed at the first context alone"  # each is compiled for itself
        if compiled and context == contexts[0]:
            ms, reason = _time_compiled(model, context, clock, n_passes, n_warm)
        for row in rows:
            if row["context"] == context:
                row |= {"model": name, "generate_ms": own, "generate_ratio": own / row["step_ms"]}
                row |= {"compiled_ms": ms, "compiled_reason": reason}
                row["compiled_ratio"] = None if ms is None else ms / row["step_ms"]
    return {"copy_gb_per_s": gb_per_s, "steps": rows, "figures": find_figures(rows, windows)}


def find_figures(rows: list[dict[str, Any]], windows: tuple[int, ...]) -> dict[str, float]:
    """The worst of the rows of the fastest route; none where a step was not captured, or ran
    another attention than the kernel.
    """
    best: dict[int, dict[str, Any]] = {}
    for row in rows:
        if row["step_ms"] <= best.get(row["context"], row)["step_ms"]:
            best[row["context"]] = row
    own = list(best.values())
    if not own or any(row["fallbacks"] for row in own):
        return {}
    found = {
        "step_share_of_floor": min(row["share_of_floor"] for row in own),
        "eager_step_ratio": min(row["generate_ratio"] for row in own),
    }
    for w in map(str, windows):
        found[f"window_{w}_step_ratio"] = max(row["window_ratios"][w] for row in own)
    compiled = [row["compiled_ratio"] for row in own if row["compiled_ratio"] is not None]
    if compiled:
        found["compiled_step_ratio"] = min(compiled)
    return found


def routes_of(window: Any) -> tuple[str, ...]:
    """The forwards that can be compared: the model's own and, where it serves the model, the fused
    decoder.
    """
    before, window.fused = window.fused, "auto"
    try:
        window.reserve(2, 8)
        return ("model", "fused") if window.route == "fused" else ("model",)
    finally:
        window.fused = before


def _measure_route(
    route: str,
    window: Any,
    context: int,
    room: int,
    gb_per_s: float,
    clock: Clock,
    windows: tuple[int, ...],
    make_runner: MakeRunner,
    count: dict[str, int],
) -> dict[str, Any]:
    """Steps of one forward at one context."""
    before = getattr(window, "fused", None)
    if before is not None:
        window.fused = True if route == "fused" else False

    def run(policy: Policy, at: int) -> dict[str, Any]:
        return time_step(window, policy, at, clock, room=room, make_runner=make_runner, **count)

    try:
        one = run(Autoregressive(), context)
        ratios, beside = {}, {}
        wide = {str(w): run(Jacobi(w), context) for w in windows}
        for w, step in wide.items():
            drift = round(step["positions"] - int(w) + 1 - one["positions"])
            beside[w] = run(Autoregressive(), context + drift) if drift > 0 else one
            ratios[w] = step["ms"] / beside[w]["ms"]
    finally:
        if before is not None:
            window.fused = before
    n_bytes = weight_bytes(window.model, window.vocab_size)
    n_bytes += key_bytes(window.model, 2, round(one["positions"]))
    floor = n_bytes / gb_per_s / 1e6
    steps = [one, *wide.values(), *beside.values()]
    why = {step[key] for step in steps for key in ("reason", "attention") if step[key]}
    return {
        "route": route,
        "context": context,
        "room": room,
        "sync_every": _SYNC_EVERY,
        "bytes": n_bytes,
        "floor_ms": floor,
        "step_ms": one["ms"],
        "share_of_floor": floor / one["ms"],
        "step": one,
        "windows": wide,
        "beside": beside,
        "windows_ms": {w: step["ms"] for w, step in wide.items()},
        "window_ratios": ratios,
        "nodes": one["nodes"],
        "runner": one["runner"],
        "reason": one["reason"],
        "attention": one["attention"] or "window_attention",
        "fallbacks": sorted(why),
    }


def _time_compiled(
    model: Any, context: int, clock: Clock, n_passes: int, n_warm: int
) -> tuple[float | None, str]:
    """Transformers' loop with a static cache and its own compiled pass, or why there is none."""
    try:
        return time_generate(model, context, clock, n_passes, n_warm, static=True), ""
    except Exception as error:  # whatever its compiler raises; the row says so
        if is_device_error(error):
            raise
        said = " ".join(str(error).split())[:200]
        return None, f"{type(error).__name__}: {said}"
