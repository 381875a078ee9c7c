"""Timings of kernels on a GPU: the torch twin and the Triton twin side by side, by entry.

A call is captured into a CUDA graph and replayed, so that what is timed is the device's work and
not the time to launch it; that the call can be captured is thereby checked as well. Before each
replay a buffer larger than the cache is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from statistics import median
from typing import Any

import torch

from mmaccel.evaluation.gpu_parts import Part

Arguments = tuple[Any, ...]
REPEATS = 21
_COPY_BYTES = 2**30
_FLUSH_BYTES = 2**28  # an H200 caches 50 MB


@dataclass(frozen=True)
class Timing:
    """One row of a kernel's table.

    Attributes:
        function: public function of `kernels/<kernel>.py`.
        name: what is timed, with its sizes and dtype.
        prepare: makes the arguments on a device.
        n_bytes: bytes that have to move at least: operands read once, results written once.
        figure: key of `gpu_figures.FIGURES` that the Triton twin's ms fill, if any.
    """

    function: str
    name: str
    prepare: Callable[[torch.device], Arguments]
    n_bytes: int
    figure: str | None = None


def _random(*shape: int) -> Callable[[torch.device], torch.Tensor]:
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


TIMINGS: dict[str, list[Timing]] = {
    "noise": [Timing("uniforms", "8 x 8 slots x 131072", _noise, 64 * 131_072 * 4)],
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


def time_call(call: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Milliseconds of device work, the median of `repeats` replays of a captured graph."""
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    found = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return median(found)


def copy_bandwidth(device: torch.device) -> float:
    """GB/s of a large copy, its read and its write counted: the memory's practical peak."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / time_call(lambda: target.copy_(source)) / 1e6


def time_kernel(kernel: str, device: torch.device) -> dict[str, Any]:
    """All timings of a kernel, as a part of the report keeps them."""
    torch_twin = import_module(f"mmaccel.kernels.{kernel}")
    triton_twin = import_module(f"mmaccel.kernels.{kernel}_triton")
    peak, rows, figures = copy_bandwidth(device), [], {}
    for timing in TIMINGS[kernel]:
        args = timing.prepare(device)
        slow, fast = (getattr(twin, timing.function) for twin in (torch_twin, triton_twin))
        torch_ms, triton_ms = time_call(lambda: slow(*args)), time_call(lambda: fast(*args))  # noqa: B023
        rate = timing.n_bytes / triton_ms / 1e6
        row = {"kernel": kernel, "name": timing.name, "torch_ms": torch_ms, "triton_ms": triton_ms}
        rows.append(row | {"gb_per_s": rate, "share_of_copy": rate / peak})
        if timing.figure is not None:
            figures[timing.figure] = triton_ms
    return {"copy_gb_per_s": peak, "timings": rows, "figures": figures}


def timing_parts(kernels: list[str]) -> list[Part]:
    """A part for the device's copy bandwidth and one for each kernel that has timings."""
    parts = [Part("copy", lambda device: {"copy_gb_per_s": copy_bandwidth(device)})]
    for kernel in kernels:
        if kernel in TIMINGS:
            parts.append(Part(f"time-{kernel}", lambda device, k=kernel: time_kernel(k, device)))  # type: ignore[misc]
    return parts
