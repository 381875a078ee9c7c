"""Timings of kernels on a GPU: the torch reference and the Triton kernel, by entry.

Ten calls or more are captured into one CUDA graph, so that what is timed is the device's work and
neither the time to launch it nor the start of a graph; that a call can be captured is thereby
checked as well. Operands that fit into a GPU's cache are there several times, 128 MB together or
more, and the calls take turns with them: in a model, a pass of weights lies between two calls.
Before each replay a buffer larger than the cache is read, which leaves nothing there that has to be
written back while the clock runs.

`TIMINGS` says what is timed: sizes, arguments, and the bytes that have to move. `window_attention`
has a file of its own, `attention`, since it is compared with more than its reference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.parts import Part
from mmaccel.kernels.accept_prefix import RowState
from mmaccel.kernels.coarse_sweep import SweepSlots, SweepWeights
from mmaccel.kernels.norm import Norm
from mmaccel.kernels.sample import Settings

Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Timing:
    """One row of a kernel's table.

    Attributes:
        function: public function of `kernels/<kernel>.py`.
        name: what is timed, with its sizes and dtype.
        prepare: makes the arguments on a device.
        n_bytes: bytes that have to move at least: operands read once, results written once.
        figure: key of `tables.FIGURES` that the Triton version's ms fill, if any; of several
            rows the slowest.
        options: arguments by name.
    """

    function: str
    name: str
    prepare: Callable[[torch.device], Arguments]
    n_bytes: int
    figure: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def _random(*shape: int) -> Callable[[torch.device], Tensor]:
    return lambda device: torch.randn(shape, device=device, dtype=torch.bfloat16)


def _lookup(device: torch.device) -> Arguments:
    return _random(4096, 8)(device), _random(16384, 8)(device)


def _chain(device: torch.device) -> Arguments:
    return _random(1500, 128)(device), _random(8, 1024, 128)(device)


def _noise(device: torch.device) -> Arguments:
    rows = torch.arange(8, device=device)
    slots = torch.arange(64, device=device).view(8, 8)
    return rows, rows, slots, 131_072, torch.zeros((), dtype=torch.int64, device=device)


def _canvas(temperature: float) -> Callable[[torch.device], Arguments]:
    def prepare(device: torch.device) -> Arguments:
        rows, slots = torch.arange(2, device=device), torch.arange(64, device=device).view(2, 32)
        purpose = torch.zeros((), dtype=torch.int64, device=device)
        logits = _random(2, 32, 126_464)(device)
        return logits, slots >= 0, temperature, rows, rows, slots, purpose

    return prepare


def _scores(
    branches: int, settings: Settings, spread: float = 1.0
) -> Callable[[torch.device], Arguments]:
    """64 slots, as a window of 32 of two images; logits of a standard deviation of `spread`."""

    def prepare(device: torch.device) -> Arguments:
        rows, slots = torch.arange(2, device=device), torch.arange(64, device=device).view(2, 32)
        purpose = torch.zeros((), dtype=torch.int64, device=device)
        logits = _random(2 * branches, 32, 131_072)(device) * spread
        return logits, branches, settings, None, rows, rows, slots, purpose

    return prepare


def _coupling(device: torch.device) -> Arguments:
    logits = torch.randn(2, 32, 131_072, device=device)
    drafts = torch.randint(131_072, (2, 31), device=device)
    coins, redraws = torch.rand(2, 31, device=device), torch.rand(2, 32, device=device)
    return logits, (logits[:, 1:] + 0.1).softmax(-1), drafts, coins, redraws


def cache(
    rows: int, query_heads: int, heads: int, width: int, head: int, room: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries `[R, Hq, W, D]`, keys and values `[R, Hkv, S, D]` as the window cache lays them out,
    and the start of a window that ends where the cache ends.
    """
    q = _random(rows, query_heads, width, head)(device)
    k, v = (_random(rows, room, heads, head)(device).transpose(1, 2) for _ in range(2))
    return q, k, v, torch.full((rows,), room - width, device=device)


def _masses(room: int) -> Callable[[torch.device], Arguments]:
    def prepare(device: torch.device) -> Arguments:
        q, k, _, start = cache(2, 32, 32, 32, 128, room, device)
        lse = torch.full((2, 32, 32), 10.0, device=device)
        return q, k, lse, start

    return prepare


def _kept(device: torch.device) -> Arguments:
    """Every second of 4096 positions stays."""
    keep = torch.arange(0, 4096, 2, device=device).expand(2, -1)
    return _random(2, 4096, 32, 128)(device), keep


def _sweep(n_values: int, seen: int, width: int = 256) -> Callable[[torch.device], Arguments]:
    """31 slots of two images, 13 neighbours and 16 candidates each; all of them are computed."""

    def prepare(device: torch.device) -> Arguments:
        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, device=device) * width**-0.5

        weights = SweepWeights(
            numbers(13 * (n_values + 1), width),
            numbers(width, width),
            numbers(width),
            numbers(n_values, width),
            numbers(n_values),
        )
        columns = torch.arange(64, 95, device=device).expand(2, -1)
        neighbours = columns[..., None] - 1 - torch.arange(13, device=device)
        is_seen = (columns < 64 + seen).contiguous()
        values, last, gates = numbers(2, 31, 16), numbers(2, n_values), numbers(2, 31)
        slots = SweepSlots(
            columns,
            neighbours,
            is_seen,
            torch.zeros_like(is_seen),
            torch.full_like(neighbours, n_values),
            numbers(2, 31, width),
            numbers(2, 31, width),
            torch.randint(n_values, (2, 31, 16), device=device),
            values,
            last,
            gates,
            numbers(2, 31, n_values),
        )
        work = torch.randint(n_values, (2, 96), device=device)
        return weights, slots, work, 1.0, 16

    return prepare


def _swept(n_values: int, seen: int, width: int = 256) -> Timing:
    """Bytes: a slot's table rows and candidates, C's inner matrix, and its scores where needed."""
    floats = 2 * 31 * 13 * width + width**2 + 2 * seen * 16 * width
    floats += n_values * width + 2 * (31 - seen) * n_values
    title = f"2 x 31 slots, {seen} seen, {n_values} ids, width {width}"
    return Timing("coarse_sweep", title, _sweep(n_values, seen, width), 4 * floats)


_WIDE = 4096  # a layer of a 7B model: its hidden states, 32 heads of 128, its MLP


def _normed(device: torch.device) -> tuple[Any, ...]:
    rows = (torch.randn(64, _WIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    return *rows, Norm(torch.randn(_WIDE, device=device, dtype=torch.bfloat16))


def _turned(device: torch.device) -> tuple[Any, ...]:
    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    stores = numbers(64, 32, 128), numbers(64, 32, 128)
    angles = numbers(64, 128), numbers(64, 128)
    return numbers(64, 3 * _WIDE), *angles, *stores, torch.arange(64, device=device)


def _gated(device: torch.device) -> tuple[Any, ...]:
    return (torch.randn(64, 2 * 11_008, device=device, dtype=torch.bfloat16),)


def _window(device: torch.device) -> tuple[Any, ...]:
    """Windows of 32 slots of two images with guidance."""
    rows, some = torch.full((2,), 100, device=device), torch.ones(4, 1, device=device).long()
    buffer, drafts = torch.ones(2, 1024, device=device).long(), torch.ones(2, 31, device=device)
    return buffer, rows, rows + 40, some, some[:, 0] * 20, drafts.long(), None


def _ending(device: torch.device) -> tuple[Any, ...]:
    """The ends of those windows' passes; calls generate a token each, and rows have room."""
    rows, new = torch.zeros(2, device=device).long(), torch.ones(2, 32, device=device).long()
    flags = (torch.zeros(2, dtype=torch.bool, device=device) for _ in range(2))
    state = RowState(
        torch.ones(2, 1024, device=device).long(),
        rows,
        rows.clone(),
        next(flags),
        rows.clone(),
        next(flags),
        rows.clone(),
        torch.zeros(512, 2, device=device).long(),
        rows.double(),
        torch.zeros(4, device=device).long(),
    )
    return new, new[:, 1:] == 0, new.float(), None, state, torch.tensor(900, device=device), None


_SLOTS, _LOGITS = 64 * 131_072, 64 * 131_072 * 2
_MS = "sample_64x131k_ms"


def _sampled(name: str, settings: Settings, spread: float = 1.0) -> Timing:
    title = f"64 x 131072, {name}, bfloat16"
    return Timing("sample_frozen", title, _scores(1, settings, spread), _LOGITS, _MS)


TIMINGS: dict[str, list[Timing]] = {
    "noise": [Timing("uniforms", "8 x 8 slots x 131072", _noise, _SLOTS * 4)],
    "sample": [
        _sampled("no filters", Settings()),
        _sampled("top-k 2000", Settings(top_k=2000)),
        _sampled("top-p 0.9, flat", Settings(top_p=0.9)),
        _sampled("top-p 0.9, steep", Settings(top_p=0.9), 4.0),
        Timing(
            "sample_frozen", "64 x 131072, guided, bfloat16", _scores(2, Settings(scale=5.0)),
            2 * _LOGITS,
        ),
    ],
    "couple": [
        Timing(
            "couple", "2 x 32 x 131072, float32", _coupling,
            (_SLOTS * 2 + 62 * 131_072) * 4,  # scores, target and draft distributions
        ),
    ],
    "add_norm": [Timing("add_norm", "64 x 4096, bfloat16", _normed, 2 * 257 * _WIDE)],
    "rope_write": [
        Timing(
            "rope_write", "64 tokens, 3 x 32 heads of 128, bfloat16", _turned,
            2 * 64 * (6 * _WIDE + 2 * 128 + 4),
        )
    ],
    "gated_act": [Timing("gated_act", "64 x 2 x 11008, bfloat16", _gated, 2 * 64 * 3 * 11_008)],
    "window_inputs": [
        Timing(
            "window_inputs", "2 rows, 2 branches, 32 slots", _window, 8 * 2 * (4 * 32 + 2 * 32),
            options={"origin": 24, "width": 32},
        )
    ],
    "accept_prefix": [
        Timing(
            "accept_prefix", "2 rows, 32 slots", _ending, 2 * 32 * (8 + 1 + 4 + 8),
            options={"origin": 24, "counts": True},
        )
    ],
    "coarse_sweep": [_swept(1024, 25), _swept(16_384, 25)],
    "column_mass": [
        Timing(
            "column_mass", f"2 rows, 32 heads of 128, window 32, {room} keys, bfloat16",
            _masses(room), 2 * 32 * (room * (256 + 4) + 32 * (256 + 4)),
            options={"scale": 128**-0.5},
        )
        for room in (4096, 16_384)
    ],
    "compact": [
        Timing(
            "compact", "2 x 2048 of 4096 positions, 32 heads of 128, bfloat16", _kept,
            2 * 2048 * (32 * 256 * 2 + 8),
        ),
    ],
    "nearest_code": [
        Timing("nearest_code", "4096 x 16384 x 8, bfloat16", _lookup, 20_480 * 16 + 4096 * 8),
        Timing(
            "nearest_codes_residual", "1500 x 8 x 1024 x 128, bfloat16", _chain,
            (1500 * 2 + 8 * 1024) * 256 + 1500 * 64,
        ),
    ],
    "unmask": [
        Timing("unmask", "64 x 126464, greedy, bfloat16", _canvas(0.0), 64 * 126_464 * 2),
        Timing("unmask", "64 x 126464, drawn, bfloat16", _canvas(1.0), 64 * 126_464 * 2),
    ],
}  # fmt: skip

Time = Callable[..., float]
REPEATS, CALLS = 21, 10  # replays, and calls in a graph
SPREAD = 128 * 10**6  # bytes of operands between two calls with the same ones
_WARM = 3  # replays before those that count
_MOST_COPIES = 64
_COPY_BYTES = 2**30
_FLUSH_BYTES = 2**28  # an H200 caches 50 MB


def time_call(*calls: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Milliseconds of device work of a call, the median of `repeats` replays of a captured graph.

    Args:
        calls: the same call with operands of its own each; they take turns.
        repeats: replays.
    """
    n_rounds = -(-CALLS // len(calls))
    for call in calls:
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(n_rounds):
            for call in calls:
                call()
    flush = torch.zeros(_FLUSH_BYTES // 4, device="cuda")
    found = []
    for _ in range(_WARM + repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.sum()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return median(found[_WARM:]) / (n_rounds * len(calls))


def time_call_on_cpu(*calls: Callable[[], Any]) -> float:
    """`time_call` where there is no GPU: every call once, by the clock."""
    found = []
    for call in calls:
        began = time.perf_counter()
        call()
        found.append(1000 * (time.perf_counter() - began))
    return median(found)


def timer_of(device: torch.device) -> Time:
    """`time_call` on a GPU."""
    return time_call if device.type == "cuda" else time_call_on_cpu


def copies_for(n_bytes: int) -> int:
    """How often operands have to be there so that a cache does not hold them all."""
    return min(-(-SPREAD // max(n_bytes, 1)), _MOST_COPIES)


def copy_bandwidth(device: torch.device, n_bytes: int = _COPY_BYTES) -> float:
    """GB/s of a large copy, its read and its write counted: the memory's practical peak.

    The faster of a copy and of a kernel that negates: in a graph a copy is a node of its own, which
    the device's copy engines may carry out below the memory's speed.
    """
    source = torch.ones(n_bytes // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    timer = timer_of(device)
    copied = timer(lambda: target.copy_(source))
    negated = timer(lambda: torch.neg(source, out=target))
    return 2 * n_bytes / min(copied, negated) / 1e6


def time_kernel(kernel: str, device: torch.device, tiny: bool = False) -> dict[str, Any]:
    """All timings of a kernel, as a part of the report keeps them.

    Args:
        kernel: its name.
        device: where to run; without a GPU the torch version alone is timed, and no figure is made.
        tiny: a copy of a megabyte for the bandwidth, and the first row alone.
    """
    torch_module = import_module(f"mmaccel.kernels.{kernel}")
    triton_module = (
        import_module(f"mmaccel.kernels.{kernel}_triton") if device.type == "cuda" else None
    )
    timer, rows = timer_of(device), []
    peak = copy_bandwidth(device, 2**20 if tiny else _COPY_BYTES)
    figures: dict[str, float] = {}
    for timing in TIMINGS[kernel][: 1 if tiny else None]:
        n_copies = 1 if tiny else copies_for(timing.n_bytes)
        operands = [timing.prepare(device) for _ in range(n_copies)]

        def run(module: Any, timing: Timing = timing, operands: Any = operands) -> float:
            function = getattr(module, timing.function)
            return timer(*(partial(function, *own, **timing.options) for own in operands))

        row = {
            "kernel": kernel,
            "name": timing.name,
            "copies": n_copies,
            "torch_ms": run(torch_module),
        }
        row |= {"triton_ms": None, "gb_per_s": None, "share_of_copy": None}
        if triton_module is not None:
            row["triton_ms"] = triton_ms = run(triton_module)
            rate = timing.n_bytes / triton_ms / 1e6
            row |= {"gb_per_s": rate, "share_of_copy": rate / peak}
            if timing.figure is not None:
                figures[timing.figure] = max(triton_ms, figures.get(timing.figure, 0.0))
        rows.append(row)
    return {"copy_gb_per_s": peak, "timings": rows, "figures": figures}


def timing_parts(kernels: list[str], tiny: bool = False) -> list[Part]:
    """A part for the device's copy bandwidth and one for each kernel that has timings."""
    n_bytes = 2**20 if tiny else _COPY_BYTES
    parts = [Part("copy", lambda device: {"copy_gb_per_s": copy_bandwidth(device, n_bytes)})]
    timed = [kernel for kernel in kernels if kernel in TIMINGS]
    parts += [Part(f"time-{kernel}", partial(time_kernel, kernel, tiny=tiny)) for kernel in timed]
    return parts
