"""The check on a GPU: all its parts in seven calls, and its command line (`scripts/gpu_check.py`).

A call is what ten minutes hold; each can be run alone, on a machine of its own, and writes what it
has after every part. What a part needs beyond torch, triton, numpy and transformers is imported
when the part runs: where a package is missing, that part alone fails. On a GPU the parts that
capture passes run in processes of their own: a capture that goes wrong leaves torch's allocator in
a state that later parts would fail in.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bitwise import ATTACHED, CASES, check_bitwise, check_promise
from benchmarks.gpu.kernels import HEADS, TIMINGS, time_attention, time_kernel, time_rows
from benchmarks.gpu.long import long_parts
from benchmarks.gpu.methods import KINDS, check_methods
from benchmarks.gpu.models import SIZES
from benchmarks.gpu.parts import CheckError, Part, describe, failed_parts, run_parts
from benchmarks.gpu.products import product_parts
from benchmarks.gpu.scenes import BATCHES, measure_canvas, measure_scenes
from benchmarks.gpu.steps import CONTEXTS, measure_steps, profile_steps
from mmaccel.errors import MMAccelError
from mmaccel.kernels.dispatch import KERNELS, find_obstacle

ROOT = Path(__file__).resolve().parents[2]
CALLS = ("correctness", "llama", "others", "kernels", "profile", "long", "products")
_CALL, _LEAST = 590.0, 60.0  # seconds of a call, and those that a part's own process has at least
_STARTED = time.monotonic()


def main(arguments: list[str], description: str) -> int:
    """Runs the check; 0 if all that was run passed, 1 if something failed, 2 without a GPU or with
    a wrong option.
    """
    reader = argparse.ArgumentParser(description=description)
    reader.add_argument(
        "--call",
        action="append",
        default=[],
        choices=CALLS,
        help="run the parts of this call; may be repeated; all of them if left out",
    )
    reader.add_argument("--part", action="append", default=[], help="run this one; may be repeated")
    reader.add_argument("--again", action="store_true", help="run parts that are there as well")
    reader.add_argument(
        "--budget", type=float, default=480.0, help="seconds after which no part starts"
    )
    reader.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder")
    reader.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    reader.add_argument("--tiny", action="store_true", help="tiny sizes, to try the check itself")
    reader.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = reader.parse_args(arguments)
    is_gpu = options.device == "cuda"
    obstacle = None
    if is_gpu:
        is_there = torch.cuda.is_available()
        lacks = "expected a GPU that torch finds, received none"
        obstacle = find_obstacle("cuda") if is_there else lacks
    if obstacle:
        print(f"gpu_check: {obstacle}; nothing was written")
        return 2
    torch.set_float32_matmul_precision("highest")  # some images turn TF32 on, by the environment
    device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")
    facts = describe(ROOT, device, " ".join(["python", "scripts/gpu_check.py", *arguments]))
    facts["device"] += ", tiny sizes" * options.tiny
    kind = "gpu" if is_gpu and not options.tiny else "check"
    file = options.out / f"{kind}-{slug(facts['device'])}.json"
    calls = make_calls(device, options.tiny, alone=is_gpu and not options.child)
    parts = {name: part for call in CALLS for name, part in calls[call].items()}
    only = [*(name for call in options.call for name in calls[call]), *options.part]
    limits = {"only": only, "again": options.again, "budget": options.budget}
    try:
        report = run_parts(parts, file, facts, device, **limits)
    except MMAccelError as error:
        print(f"gpu_check: {error}")
        return 2
    for name in failed_parts(report):
        print(f"{name} failed: {report['parts'][name]['message']}")
    if report["left"]:
        print(f"left for the next call: {', '.join(report['left'])}")
    print(file)
    return int(bool(failed_parts(report)))


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def make_calls(
    device: torch.device, tiny: bool = False, alone: bool = False
) -> dict[str, dict[str, Part]]:
    """The parts of each call by name, in order: what must be right first, then what it costs.
    `alone`: parts that capture passes run in processes of their own.
    """
    from tests.kernels.gpu_cases import run_cases

    is_gpu = device.type == "cuda"
    found: dict[str, dict[str, Part]] = {call: {} for call in CALLS}
    correctness, others = found["correctness"], found["others"]
    for name in (*CASES, ATTACHED):
        correctness[f"engine-bitwise-{slug(name)}"] = partial(check_bitwise, name, tiny=tiny)
    for name in CASES:
        correctness[f"engine-promise-{slug(name)}"] = partial(check_promise, name, tiny=tiny)
    for kind in KINDS:
        correctness[f"methods-{kind}"] = partial(check_methods, kind)
    for size in SIZES:
        is_llama = size.kind.startswith("Llama")
        # one for each context, so that a part that is ended takes no other's times with it
        for context in (24,) if tiny else CONTEXTS:
            step = partial(measure_steps, size, context, tiny=tiny)
            found["llama" if is_llama else "others"][f"engine-step-{slug(size.name)}-{context}"] = (
                step
            )
        if is_llama:
            profile = partial(profile_steps, size, tiny=tiny)
            found["profile"][f"profile-{slug(size.name)}"] = profile
    for batch in (1,) if tiny else BATCHES:  # each compiles for a minute
        others[f"scenes-{batch}"] = partial(measure_scenes, batch, tiny=tiny)
    others["canvas"] = partial(measure_canvas, tiny=tiny)
    found["long"] = long_parts(tiny)
    found["products"] = product_parts(tiny)
    if alone:
        for parts in found.values():
            parts.update({name: partial(run_alone, name, tiny) for name in parts})
    if is_gpu:  # the cases run in Triton's interpreter where there is no GPU
        cases = {f"cases-{kernel}": partial(run_cases, kernel) for kernel in KERNELS}
        found["correctness"] = cases | correctness
    timed = found["kernels"]
    for kernel in TIMINGS:
        timed[f"time-{kernel}"] = partial(time_kernel, kernel, tiny=tiny)
    for number, name in enumerate(HEADS, 1):
        timed[f"time-window_attention-{number}"] = partial(time_attention, name, tiny=tiny)
    timed["time-window_attention-ragged"] = partial(time_rows, tiny=tiny)
    return found


def run_alone(name: str, tiny: bool, device: torch.device) -> dict[str, Any]:
    """Run a part in a process of its own, which writes a report of its own; memory that nothing
    holds here is given back before.
    """
    gc.collect()
    torch.cuda.empty_cache()
    script = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--child", "--part", name]
    left = _CALL - (time.monotonic() - _STARTED)
    command = [*script, "--device", device.type, *(["--tiny"] if tiny else [])]
    return run_process(command, name, max(left, _LEAST))


def run_process(command: Sequence[str], name: str, limit: float) -> dict[str, Any]:
    """Run a command that takes `--out FOLDER` and writes a report with one part there."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run([*command, "--out", folder], timeout=limit, check=False)
        except subprocess.TimeoutExpired as error:
            raise CheckError(f"its process did not end in {limit:.0f} s", {}) from error
        files = list(Path(folder).glob("*.json"))
        part = json.loads(files[0].read_text(encoding="utf-8"))["parts"][name] if files else {}
    if not part or part["message"] == "it began and did not end":
        raise CheckError(f"its process ended with {done.returncode} and no result", {})
    message = part.pop("message")
    found = {key: part[key] for key in part if key not in ("of", "date", "seconds", "status")}
    if part["status"] == "failed":
        raise CheckError(message, found)
    return found
