"""Timings of kernels on a GPU: the torch twin and the Triton twin side by side, by entry.

A call is captured into a CUDA graph and replayed, so that what is timed is the device's work and
not the time to launch it; that the call can be captured is thereby checked as well. Before each
replay a buffer larger than the cache is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from statistics import median
from typing import Any

import torch

from mmaccel.evaluation.gpu_parts import Part
from mmaccel.evaluation.gpu_sizes import TIMINGS

Time = Callable[[Callable[[], Any]], float]
REPEATS = 21
_COPY_BYTES = 2**30
_FLUSH_BYTES = 2**28  # an H200 caches 50 MB


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
    peak, rows = copy_bandwidth(device), []
    figures: dict[str, float] = {}
    for timing in TIMINGS[kernel]:
        args = timing.prepare(device)
        slow, fast = (getattr(twin, timing.function) for twin in (torch_twin, triton_twin))
        options = dict(timing.options)
        torch_ms = time_call(lambda: slow(*args, **options))  # noqa: B023
        triton_ms = time_call(lambda: fast(*args, **options))  # noqa: B023
        rate = timing.n_bytes / triton_ms / 1e6
        row = {"kernel": kernel, "name": timing.name, "torch_ms": torch_ms, "triton_ms": triton_ms}
        rows.append(row | {"gb_per_s": rate, "share_of_copy": rate / peak})
        if timing.figure is not None:
            figures[timing.figure] = max(triton_ms, figures.get(timing.figure, 0.0))
    return {"copy_gb_per_s": peak, "timings": rows, "figures": figures}


def timing_parts(kernels: list[str]) -> list[Part]:
    """A part for the device's copy bandwidth and one for each kernel that has timings."""
    parts = [Part("copy", lambda device: {"copy_gb_per_s": copy_bandwidth(device)})]
    for kernel in kernels:
        if kernel in TIMINGS:
            parts.append(Part(f"time-{kernel}", lambda device, k=kernel: time_kernel(k, device)))  # type: ignore[misc]
    return parts
