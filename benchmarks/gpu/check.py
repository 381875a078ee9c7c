"""The check on a GPU: all its parts in five calls, and its command line (`scripts/gpu_check.py`).

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
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.attention import attention_parts
from benchmarks.gpu.bitwise import ATTACHED, CASES, check_bitwise, check_promise
from benchmarks.gpu.machine import describe, slug
from benchmarks.gpu.methods import KINDS, check_methods
from benchmarks.gpu.models import SIZES, Size, build, open_window, shrink
from benchmarks.gpu.parts import CheckError, Part, attempt, failed_parts, run_parts
from benchmarks.gpu.scenes import BATCHES, measure_scenes
from benchmarks.gpu.steps import CONTEXTS, device_clock, measure_steps, routes_of, time_step
from benchmarks.gpu.timing import copy_bandwidth, timing_parts
from mmaccel.errors import MMAccelError, OptionError
from mmaccel.kernels.dispatch import KERNELS, find_obstacle
from mmaccel.samplers.window.autoregressive import Autoregressive
from mmaccel.samplers.window.jacobi import Jacobi

ROOT = Path(__file__).resolve().parents[2]
CALLS = ("correctness", "llama", "others", "kernels", "profile")
_CALL, _LEAST = 590.0, 60.0  # seconds of a call, and those that a part's own process has at least
_STARTED = time.monotonic()
_LONGEST = 10  # nodes of a profile
_TINY = {"windows": (4,), "n_passes": 8, "n_warm": 2, "compiled": False}


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
    reader.add_argument("--child", type=Path, help=argparse.SUPPRESS)  # where a child writes
    options = reader.parse_args(arguments)
    obstacle = _find_obstacle(options.device)
    if obstacle:
        print(f"gpu_check: {obstacle}; nothing was written")
        return 2
    torch.set_float32_matmul_precision("highest")  # some images turn TF32 on, by the environment
    is_gpu = options.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")
    if options.child is not None:
        return _run_child(options.part, options.child, device, options.tiny)
    facts = describe(ROOT, device, " ".join(["python", "scripts/gpu_check.py", *arguments]))
    facts["device"] += ", tiny sizes" * options.tiny
    file = (
        options.out
        / f"{'gpu' if is_gpu and not options.tiny else 'check'}-{slug(facts['device'])}.json"
    )
    calls = make_calls(device, options.tiny)
    names = [part.name for name in options.call for part in calls[name]]
    try:
        report = run_parts(
            [part for name in CALLS for part in calls[name]],
            file,
            facts,
            device,
            only=[*names, *options.part],
            again=options.again,
            budget=options.budget,
        )
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


def _find_obstacle(device: str) -> str | None:
    """Why the check cannot run."""
    if device == "cpu":
        return None
    if not torch.cuda.is_available():
        return "expected a GPU that torch finds, received none"
    return find_obstacle("cuda")


def make_calls(
    device: torch.device, tiny: bool = False, alone: bool = True
) -> dict[str, list[Part]]:
    """The parts of each call, in order: what must be right first, then what it costs.

    Args:
        device: where they run.
        tiny: sizes that a CPU takes in seconds.
        alone: whether parts that capture passes run in processes of their own, on a GPU.
    """
    from tests.kernels.gpu_cases import cases_part

    kernels = list(KERNELS)
    llama = [size for size in SIZES if size.kind.startswith("Llama")]
    others = [size for size in SIZES if size not in llama]
    found = {
        "correctness": [
            *(
                Part(f"engine-bitwise-{slug(name)}", partial(run_bitwise, name, tiny=tiny))
                for name in (*CASES, ATTACHED)
            ),
            *(
                Part(f"engine-promise-{slug(name)}", partial(run_promise, name, tiny=tiny))
                for name in CASES
            ),
            *(Part(f"methods-{kind}", partial(check_methods, kind)) for kind in KINDS),
        ],
        "llama": [part for size in llama for part in _step_parts(size, tiny)],
        "others": [
            *(part for size in others for part in _step_parts(size, tiny)),
            *(
                Part(f"scenes-{batch}", partial(run_scenes, batch, tiny=tiny))
                for batch in ((1,) if tiny else BATCHES)
            ),
            Part("canvas", partial(run_canvas, tiny=tiny)),
        ],
        "kernels": [],
        "profile": [
            Part(f"profile-{slug(size.name)}", partial(run_profile, size, tiny=tiny))
            for size in llama
        ],
    }
    if alone and device.type == "cuda":
        for parts in found.values():
            parts[:] = [Part(part.name, partial(run_alone, part.name, tiny)) for part in parts]
    if device.type == "cuda":  # the cases run in Triton's interpreter where there is no GPU
        found["correctness"] = [*map(cases_part, kernels), *found["correctness"]]
    found["kernels"] = [*timing_parts(kernels, tiny), *attention_parts(device, tiny)]
    return found


def run_alone(name: str, tiny: bool, device: torch.device) -> dict[str, Any]:
    """Run a part in a process of its own; memory that nothing holds is given back before.

    Raises:
        CheckError: the part failed, or its process was ended or ran too long.
    """
    free(device)
    script = ROOT / "scripts" / "gpu_check.py"
    command = [sys.executable, str(script), "--part", name, "--device", device.type]
    left = _CALL - (time.monotonic() - _STARTED)
    return run_process([*command, *(["--tiny"] if tiny else [])], max(left, _LEAST))


def run_process(command: Sequence[str], limit: float) -> dict[str, Any]:
    """Run a command that takes `--child FILE` and writes a part's result there.

    Raises:
        CheckError: the result is a failure, or there is none.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        try:
            done = subprocess.run([*command, "--child", str(file)], timeout=limit, check=False)
        except subprocess.TimeoutExpired as error:
            raise CheckError(f"its process did not end in {limit:.0f} s", {}) from error
        if not file.is_file():
            raise CheckError(f"its process ended with {done.returncode} and no result", {})
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if result.pop("status") == "failed":
        raise CheckError(result.pop("message"), result)
    return result


def _run_child(names: Sequence[str], file: Path, device: torch.device, tiny: bool) -> int:
    """The one part that a parent asks for; the result, a failure as well, goes into `file`."""
    parts = {
        part.name: part for call in make_calls(device, tiny, alone=False).values() for part in call
    }
    if len(names) != 1 or names[0] not in parts:
        raise OptionError(f"part: expected one of {', '.join(parts)}, received {names!r}")
    result, _ = attempt(parts[names[0]], device)
    file.write_text(json.dumps(result), encoding="utf-8")
    return 0


def _step_parts(size: Size, tiny: bool) -> list[Part]:
    """One for each context, so that a part that is ended takes no other's times with it."""
    return [
        Part(f"engine-step-{slug(size.name)}-{n}", partial(run_size, size, n, tiny=tiny))
        for n in ((24,) if tiny else CONTEXTS)
    ]


def run_bitwise(name: str, device: torch.device, tiny: bool = False) -> dict[str, Any]:
    """See `bitwise.check_bitwise`."""
    few: dict[str, Any] = {
        "policies": (Jacobi(4),),
        "batches": ((2, 4),),
        "scales": (1.0,),
        "length": 6,
    }
    return check_bitwise(device, names=(name,), **(few if tiny else {}))


def run_promise(name: str, device: torch.device, tiny: bool = False) -> dict[str, Any]:
    """See `bitwise.check_promise`."""
    few: dict[str, Any] = {"windows": (4,), "rows": 1, "scales": (1.0,), "length": 6}
    return check_promise(device, names=(name,), **(few if tiny else {}))


def run_scenes(batch: int, device: torch.device, tiny: bool = False) -> dict[str, Any]:
    """See `scenes.measure_scenes`; a part for each batch, as each compiles for a minute."""
    from benchmarks.route_runs import Routes

    if not tiny:
        is_gpu = device.type == "cuda"
        return measure_scenes(device, batches=(batch,), needs_graphs=is_gpu)
    routes = Routes("scenes", length=4, device=device)
    return measure_scenes(
        device, routes, batches=(batch,), scales=(1.0,), repeats=1, needs_graphs=False
    )


def run_canvas(device: torch.device, tiny: bool = False) -> dict[str, Any]:
    """See `canvas.measure_canvas`."""
    from benchmarks.gpu.canvas import POLICIES, measure_canvas

    if not tiny:
        return measure_canvas(device)
    # a slot a pass takes a CPU a minute
    made = measure_canvas(device, policies=POLICIES[1:3], batches=(1,), repeats=1)
    return made | {"figures": {}}


def run_size(size: Size, context: int, device: torch.device, tiny: bool = False) -> dict[str, Any]:
    """Steps of one model at one context; its memory is free again after it."""
    peak = copy_bandwidth(device, 2**20) if tiny else copy_bandwidth(device)
    size = shrink(size) if tiny else size
    model: Any = build(size, device)
    try:
        with torch.no_grad():
            window: Any = open_window(model, size)
            # each context is compiled for itself, which takes a minute
            options: Any = _TINY if tiny else {"compiled": context == CONTEXTS[0]}
            return measure_steps(
                size.name, model, window, peak, device_clock(device), contexts=(context,), **options
            )
    finally:
        model = window = None  # a window holds its model
        free(device)


def run_profile(size: Size, device: torch.device, tiny: bool = False) -> dict[str, Any]:
    """The nodes of a captured pass that take longest, of five replays, by forward and window."""
    size = shrink(size) if tiny else size
    model: Any = build(size, device)
    rows = []
    try:
        with torch.no_grad():
            window: Any = open_window(model, size)
            for route in routes_of(window):
                if hasattr(window, "fused"):
                    window.fused = route == "fused"
                for policy in (Autoregressive(), Jacobi(4 if tiny else 32)):
                    step = time_step(
                        window,
                        policy,
                        24 if tiny else 1024,
                        device_clock(device),
                        n_passes=8 if tiny else 32,
                        n_warm=2,
                        profile=_LONGEST,
                    )
                    rows.append({"model": size.name, "route": route, "policy": repr(policy)} | step)
        return {"profiles": rows}
    finally:
        model = window = None
        free(device)


def free(device: torch.device) -> None:
    """Give memory back that nothing holds."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
