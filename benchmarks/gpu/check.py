"""The check on a GPU: all its parts in order, and its command line (`scripts/gpu_check.py`).

What a part needs beyond torch, triton, numpy and transformers is imported when the part runs: where
a package is missing, that part alone fails.
"""

from __future__ import annotations

import argparse
import gc
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.attention import attention_parts
from benchmarks.gpu.machine import describe, slug
from benchmarks.gpu.models import SIZES, Size, build, open_window
from benchmarks.gpu.parts import Part, failed_parts, run_parts
from benchmarks.gpu.steps import device_clock, measure_steps
from benchmarks.gpu.timing import copy_bandwidth, timing_parts
from mmaccel.errors import MMAccelError
from mmaccel.kernels.dispatch import KERNELS, find_obstacle

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str], description: str) -> int:
    """Runs the check.

    Args:
        arguments: of the command line.
        description: of the program, for `--help`.

    Returns:
        The exit status: 0 if all that was run passed, 1 if something failed, 2 without a GPU or
        with a wrong option.
    """
    reader = argparse.ArgumentParser(description=description)
    reader.add_argument("--part", action="append", default=[], help="run this one; may be repeated")
    reader.add_argument("--again", action="store_true", help="run parts that are there as well")
    reader.add_argument(
        "--budget", type=float, default=420.0, help="seconds after which no part starts"
    )
    reader.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder")
    options = reader.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu_check: expected a GPU that torch finds, received none; nothing was written")
        return 2
    obstacle = find_obstacle("cuda")
    if obstacle is not None:
        print(f"gpu_check: {obstacle}; nothing was written")
        return 2
    torch.set_float32_matmul_precision("highest")  # some images turn TF32 on, by the environment
    device = torch.device("cuda", torch.cuda.current_device())
    facts = describe(ROOT, device, " ".join(["python", "scripts/gpu_check.py", *arguments]))
    file = options.out / f"gpu-{slug(facts['device'])}.json"
    try:
        report = run_parts(
            make_parts(), file, facts, device,
            only=options.part, again=options.again, budget=options.budget,
        )  # fmt: skip
    except MMAccelError as error:
        print(f"gpu_check: {error}")
        return 2
    failed = failed_parts(report)
    for name in failed:
        print(f"{name} failed: {report['parts'][name]['message']}")
    if report["left"]:
        print(f"left for the next call: {', '.join(report['left'])}")
    print(file)
    return int(bool(failed))


def make_parts() -> list[Part]:
    """Everything there is to run, in order: what must be right first, then what it costs."""
    from tests.kernels.gpu_cases import cases_part

    kernels, engine = list(KERNELS), engine_parts()
    timings = [*timing_parts(kernels), *attention_parts()]
    return [*map(cases_part, kernels), *engine, *timings]


def engine_parts() -> list[Part]:
    """Same tokens in graphs, the trained models end to end, and steps at true size."""
    return [
        Part("engine-bitwise", run_bitwise),
        Part("scenes", run_scenes),
        Part("canvas", run_canvas),
        *(Part(f"engine-step-{slug(size.name)}", partial(run_size, size)) for size in SIZES),
    ]


def run_bitwise(device: torch.device) -> dict[str, Any]:
    """See `bitwise.check_bitwise`."""
    from benchmarks.gpu.bitwise import check_bitwise

    return check_bitwise(device)


def run_scenes(device: torch.device) -> dict[str, Any]:
    """See `scenes.measure_scenes`."""
    from benchmarks.gpu.scenes import measure_scenes

    return measure_scenes(device)


def run_canvas(device: torch.device) -> dict[str, Any]:
    """See `canvas.measure_canvas`."""
    from benchmarks.gpu.canvas import measure_canvas

    return measure_canvas(device)


def run_size(size: Size, device: torch.device) -> dict[str, Any]:
    """Steps of one model; its memory is free again after it."""
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
