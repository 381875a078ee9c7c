"""Check the kernels on this machine's GPU and time them; resumable, part by part.

    python scripts/gpu_check.py [--part NAME] [--again] [--budget SECONDS] [--out FOLDER]

Writes gpu-<device>.json. Exit status: 0 if all that was run passed, 1 if something failed, 2
without a GPU or with a wrong option. Needs torch, triton, numpy and transformers, and nothing else.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from mmaccel.errors import MMAccelError  # noqa: E402
from mmaccel.evaluation.gpu_attention import attention_parts  # noqa: E402
from mmaccel.evaluation.gpu_engine import engine_parts  # noqa: E402
from mmaccel.evaluation.gpu_machine import describe, slug  # noqa: E402
from mmaccel.evaluation.gpu_parts import Part, failed_parts, run_parts  # noqa: E402
from mmaccel.evaluation.gpu_timing import timing_parts  # noqa: E402
from mmaccel.kernels.dispatch import KERNELS, find_obstacle  # noqa: E402


def make_parts() -> list[Part]:
    """Everything there is to run, in order: what must be right first, then what it costs."""
    from tests.kernels.gpu_cases import cases_part

    kernels, engine = list(KERNELS), engine_parts()
    timings = [*timing_parts(kernels), *attention_parts()]
    return [*map(cases_part, kernels), *engine, *timings]


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    reader = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    reader.add_argument("--part", action="append", default=[], help="run this one; may be repeated")
    reader.add_argument("--again", action="store_true", help="run parts that are there as well")
    reader.add_argument("--budget", type=float, default=420.0, help="seconds; start nothing behind")
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
