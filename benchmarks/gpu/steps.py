"""Times of decoding steps at a fixed context, and the memory traffic below which no step can go.

A step is a pass of an ordinary run: forward, sampling parameters, noise, acceptance, pointers and
stop test, and the host's reads of them. A `Stopwatch` stands between the run and its step runner.
It starts when every graph is captured and a first replay is over, so that what it reads is the time
of passes as they go on for the rest of a run. The context is the size of the cache, all of which a
captured pass reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.models import key_bytes, weight_bytes
from benchmarks.gpu.parts import CheckError
from mmaccel.contracts import Policy, Prompt, TokenModel
from mmaccel.pipelines.causal_lm.image_vocabulary import ImageTokenWindow
from mmaccel.pipelines.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.runner.engine import Engine
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.autoregressive import Autoregressive
from mmaccel.samplers.window.jacobi import Jacobi
from mmaccel.samplers.window.step_runner import GraphKey, StaticBuffers, StepRunner

Clock = Callable[[], float]


class Enough(Exception):
    """All passes that were wanted are timed."""


class Stopwatch:
    """A `StepRunner` that takes the time of the passes that are replayed.

    Args:
        runner: carries out the passes.
        n_passes: how many to time at most; the pass after them raises `Enough`.
        clock: seconds, of a device that has finished its work.

    Attributes:
        seconds: of the passes timed, all together.
        timed: number of passes timed.
    """

    captures = 0
    has_cache = False  # what is timed serves no later run

    def __init__(self, runner: StepRunner, n_passes: int, clock: Clock) -> None:
        self.runner, self.n_passes, self.clock = runner, n_passes, clock
        self.is_static, self.sync_every = runner.is_static, runner.sync_every
        self.reason = runner.reason
        self.seconds, self.timed = 0.0, 0
        self._began: float | None = None

    @property
    def name(self) -> str:
        """What statistics call the runner inside."""
        return self.runner.name

    def load(self, key: GraphKey | None, inputs: dict[str, Tensor]) -> StaticBuffers | None:
        """See `StepRunner.load`."""
        self._began = None
        return self.runner.load(key, inputs)

    def reserve(self, model: TokenModel, rows: int, positions: int) -> None:
        """See `StepRunner.reserve`."""
        self.runner.reserve(model, rows, positions)

    def finish(self) -> None:
        """See `StepRunner.finish`."""
        self.runner.finish()

    def free_memory(self) -> bool:
        """See `StepRunner.free_memory`."""
        return self.runner.free_memory()

    def run_step(self, key: Hashable | None, step: Callable[[], None]) -> bool:
        """See `StepRunner.run_step`.

        Raises:
            Enough: as many passes as were wanted are timed.
        """
        if self.timed == self.n_passes:
            raise Enough
        is_usual = self.runner.run_step(key, step)
        self.reason = self.runner.reason
        if self._began is not None:
            self.timed += 1
        elif is_usual:  # the first of its kind is not timed
            self._began = self.clock()
        return is_usual

    def stop(self) -> None:
        """After the last pass, whether the run came to its end or not."""
        if self._began is not None:
            self.seconds = self.clock() - self._began


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
_N_PASSES, _FEWEST = 16, 4
_N_LOST = 6  # passes of a run that are not timed: the first, one aside, the record, and a group
_SYNC_EVERY = 4
_FILTERS = SamplingParams(guidance_scale=5.0)


def engine_runner(
    window: CausalLMWindow, prompt: Prompt, policy: Policy, params: SamplingParams
) -> StepRunner:
    """A runner that captures passes; raises where that cannot be."""
    return Engine(True, _SYNC_EVERY).runner(window, prompt, policy, params)


def time_step(
    window: CausalLMWindow,
    policy: Policy,
    width: int,
    context: int,
    clock: Clock,
    make_runner: MakeRunner = engine_runner,
    n_passes: int = _N_PASSES,
) -> float:
    """Milliseconds of a captured pass of one image with guidance, two rows.

    Args:
        window: the model.
        policy: whose passes are timed.
        width: tokens a pass keeps at most.
        context: positions of the cache, prompt and tokens together; half of it at most is tokens.
        clock, make_runner, n_passes: what times, how passes are carried out, and how many.

    Raises:
        CheckError: the run ended before four passes were timed.
    """
    length = min(context // 2, width * (n_passes + _N_LOST + _SYNC_EVERY))
    shape = (2, context - length + 1)  # the last token is not forwarded
    prompt = Prompt(
        torch.ones(shape, dtype=torch.int64, device=window.device),
        torch.full((2,), shape[1], device=window.device), 2,
    )  # fmt: skip
    if isinstance(window, ImageTokenWindow):
        window.begin(prompt)
    noise = Noise.from_seed(0, 1, window.device)
    watch = Stopwatch(make_runner(window, prompt, policy, _FILTERS), n_passes, clock)
    window.runner = watch
    with suppress(Enough):
        policy.sample(window, prompt, length, params=_FILTERS, noise=noise)
    watch.stop()
    window.runner = None
    watch.finish()  # graphs and their memory go
    if watch.timed < _FEWEST:
        raise CheckError(
            f"{policy!r} at {context} positions: expected {_FEWEST} passes to time or more, "
            f"received {watch.timed} before the end; take a longer context", {},
        )  # fmt: skip
    return 1000 * watch.seconds / watch.timed


def time_generate(model: Any, context: int, clock: Clock, n_tokens: int = _N_PASSES) -> float:
    """Milliseconds of a step of transformers' own `generate`, two rows, sampled.

    Two plain rows, as Janus' own loop has them with guidance; the processor that other models use
    for guidance runs a second forward a step and would only be slower.
    """
    ids = torch.ones(2, context - n_tokens, dtype=torch.int64, device=model.device)
    seconds = []
    for n_new in (2, 2, 2 + n_tokens):  # the first sets libraries up
        began = clock()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0,
            max_new_tokens=n_new, min_new_tokens=n_new,
        )  # fmt: skip
        seconds.append(clock() - began)
    return 1000 * (seconds[2] - seconds[1]) / n_tokens


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
    n_passes: int = _N_PASSES,
) -> dict[str, Any]:
    """Steps of a model as a part of the report keeps them; figures are its worst.

    Args:
        name: of the model.
        model, window: the same, as transformers and as samplers see it.
        gb_per_s: measured bandwidth of a copy, which the floor is made of.
        clock: see `device_clock`.
        contexts, windows, make_runner, n_passes: see `time_step`.
    """
    rows: list[dict[str, Any]] = []
    for context in contexts:
        n_bytes = weight_bytes(model, window.vocab_size) + key_bytes(model, 2, context)
        args = (context, clock, make_runner, n_passes)
        one = time_step(window, Autoregressive(), 1, *args)
        wide = {str(w): time_step(window, Jacobi(w), w, *args) for w in windows}
        floor = n_bytes / gb_per_s / 1e6
        own = time_generate(model, context, clock, n_passes)
        rows.append({
            "model": name, "context": context, "sync_every": _SYNC_EVERY, "bytes": n_bytes,
            "floor_ms": floor, "step_ms": one, "share_of_floor": floor / one, "windows_ms": wide,
            "window_ratios": {w: ms / one for w, ms in wide.items()},
            "generate_ms": own, "generate_ratio": own / one,
        })  # fmt: skip
    figures = {
        "step_share_of_floor": min(row["share_of_floor"] for row in rows),
        "eager_step_ratio": min(row["generate_ratio"] for row in rows),
    }
    for w in map(str, windows):
        figures[f"window_{w}_step_ratio"] = max(row["window_ratios"][w] for row in rows)
    return {"copy_gb_per_s": gb_per_s, "steps": rows, "figures": figures}
