"""The parts of the check on GPUs that concern the engine.

What a part needs is imported when it runs: where a package is missing, that part alone fails.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

from mmaccel.evaluation.gpu_models import SIZES, Size, build, open_window
from mmaccel.evaluation.gpu_parts import Part
from mmaccel.evaluation.gpu_steps import measure_steps
from mmaccel.evaluation.gpu_stopwatch import device_clock
from mmaccel.evaluation.gpu_timing import copy_bandwidth


def engine_parts() -> list[Part]:
    """Same tokens in graphs, the trained models end to end, and steps at true size."""
    parts = [Part("engine-bitwise", run_bitwise), Part("scenes", run_scenes)]
    parts.append(Part("canvas", run_canvas))
    for size in SIZES:
        parts.append(Part(f"engine-step-{slug(size)}", lambda device, s=size: run_size(s, device)))  # type: ignore[misc]
    return parts


def run_bitwise(device: torch.device) -> dict[str, Any]:
    """See `gpu_bitwise.check_bitwise`."""
    from mmaccel.evaluation.gpu_bitwise import check_bitwise

    return check_bitwise(device)


def run_scenes(device: torch.device) -> dict[str, Any]:
    """See `gpu_scenes.measure_scenes`."""
    from mmaccel.evaluation.gpu_scenes import measure_scenes

    return measure_scenes(device)


def run_canvas(device: torch.device) -> dict[str, Any]:
    """See `gpu_canvas.measure_canvas`."""
    from mmaccel.evaluation.gpu_canvas import measure_canvas

    return measure_canvas(device)


def slug(size: Size) -> str:
    """A model's name as a part of a name."""
    return size.name.lower()


def run_size(size: Size, device: torch.device) -> dict[str, Any]:
    """Steps of one model; its memory is free again behind it."""
    peak = copy_bandwidth(device)
    model: Any = build(size, device)
    try:
        with torch.no_grad():
            window: Any = open_window(model, size)
            return measure_steps(size.name, model, window, peak, device_clock(device))
    finally:
        model = window = None  # a window holds its model
        free(device)


def free(device: torch.device) -> None:
    """Give memory back that nothing holds."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
