"""Two versions of mmaccel side by side, each in an environment of its own: seconds an image.

    git worktree add ../old REVISION && python -m venv ../old-env
    ../old-env/bin/pip install "torch==SAME" "transformers==SAME" ../old
    python benchmarks/versions.py ../old-env/bin/python --revision REVISION --count 16 --json FILE

The environment of this process has the version that is judged. Both make the same images, caption
by caption in turn, while the other waits, so that what else the machine does falls on both. The
figures are medians of images, and of the ratios of the same image by both. Seconds are those of the
tokens; pixels are not in them. `torch.compile` is timed after it has compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

WAYS: dict[str, dict[str, Any]] = {  # arguments of `from_pretrained` of the version that is judged
    "fused": {"fused": True, "compile": False},
    "compiled": {"compile": True},
}


@dataclass(frozen=True)
class Cell:
    """What both versions make: images by a policy, at a batch size and a guidance scale."""

    policy: str
    arguments: tuple[tuple[str, Any], ...]
    batch_size: int
    guidance: float


def list_cells(batch_sizes: list[int], scales: list[float]) -> list[Cell]:
    """The plain loop and `Jacobi`: window 32 for one image, 8 and the adaptive one for several."""
    cells = []
    for size in batch_sizes:
        for scale in scales:
            windows = [32] if size == 1 else [8, "adaptive"]
            cells.append(Cell("Autoregressive", (), size, scale))
            cells += [Cell("Jacobi", (("window", w),), size, scale) for w in windows]
    return cells


class Version:
    """A process that makes images with the mmaccel of its environment."""

    def __init__(self, python: str, options: dict[str, Any], model: str, threads: int) -> None:
        # -P, and another folder: the environment's mmaccel, not this checkout's
        command = [python, "-P", str(Path(__file__).resolve()), "--worker"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
        self.facts = self.ask({"model": model, "options": options})

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send a question, and wait for the answer."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps(question), file=process.stdin, flush=True)
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"a version's process ended with {process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def work() -> None:
    """What a version's process does: it answers questions, a line each, until there are no more."""
    answers, sys.stdout = sys.stdout, sys.stderr
    import torch
    import transformers

    import mmaccel
    from mmaccel.demo.scenes.data import EVALUATION_SEED, make_captions

    opened = json.loads(sys.stdin.readline())
    pipe = mmaccel.TextToImage.from_pretrained(
        opened["model"], device="cpu", dtype="float32", **opened["options"]
    )
    facts = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps(facts), file=answers, flush=True)
    for line in sys.stdin:
        cell, first = (question := json.loads(line))["cell"], question["first"]
        numbers = range(first, first + cell["batch_size"])
        policy = getattr(mmaccel, cell["policy"])(**dict(cell["arguments"]))
        began = time.perf_counter()
        out = pipe(
            make_captions(EVALUATION_SEED, numbers), policy=policy, seed=list(numbers),
            guidance_scale=cell["guidance"],
        )  # fmt: skip
        seconds = time.perf_counter() - began - out.stats.pixel_seconds
        made = {
            "seconds": seconds / len(numbers),
            "tokens_per_pass": out.stats.tokens_per_pass,
            "tokens": out.tokens.tolist(),
        }
        print(json.dumps(made), file=answers, flush=True)


def measure(versions: dict[str, Version], cells: list[Cell], count: int) -> list[dict[str, Any]]:
    """A row for each cell and version; "before" is the one that the others are compared with."""
    made: dict[tuple[Cell, str], list[dict[str, Any]]] = {}
    for cell in cells:  # windows, compiled passes and the adaptive window's calibration
        for version in versions.values():
            for _ in range(2):
                version.ask({"cell": asdict(cell), "first": 0})
    largest, turn = max(cell.batch_size for cell in cells), 0
    for first in range(0, count, largest):
        for cell in cells:
            for start in range(first, min(first + largest, count), cell.batch_size):
                names, turn = list(versions), turn + 1
                at = turn % len(names)
                for name in names[at:] + names[:at]:
                    answer = versions[name].ask({"cell": asdict(cell), "first": start})
                    made.setdefault((cell, name), []).append(answer)
        print(f"{min(first + largest, count)} of {count} captions", file=sys.stderr)
    rows = []
    for (cell, name), own in made.items():
        before = made[cell, "before"]
        pairs = [(a, b) for x, y in zip(before, own) for a, b in zip(x["tokens"], y["tokens"])]
        rows.append(
            asdict(cell)
            | {
                "version": name,
                "images": len(pairs),
                "seconds": median(answer["seconds"] for answer in own),
                "tokens_per_pass": median(answer["tokens_per_pass"] for answer in own),
                "times": median(x["seconds"] / y["seconds"] for x, y in zip(before, own)),
                "identical": sum(a == b for a, b in pairs),
            }
        )
    return rows


def main() -> None:
    """Measure, print a line for each row, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", help="of the environment with the version to compare with")
    parser.add_argument(
        "--revision", required=True, help="what that environment has, for the report"
    )
    parser.add_argument("--model", default="scenes")
    parser.add_argument("--count", type=int, default=16, help="captions; a multiple of the batches")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0, 2.0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    versions = {"before": Version(options.python, {}, options.model, options.threads)}
    for name, arguments in WAYS.items():
        versions[name] = Version(sys.executable, arguments, options.model, options.threads)
    rows = measure(versions, list_cells(options.batch_sizes, options.guidance), options.count)
    for row in rows:
        print(
            f"batch {row['batch_size']} guidance {row['guidance']} {row['policy']} "
            f"{dict(row['arguments'])} {row['version']}: {row['seconds']:.3f} s an image, "
            f"{row['times']:.2f} times"
        )
    for version in versions.values():
        version.close()
    if options.json is not None:
        from mmaccel.outputs.machine import describe_machine  # not in a worker of another version

        report = {
            "command": shlex.join(["python", *sys.argv]),
            "before": options.revision,
            "machine": describe_machine("cpu") | {"threads": options.threads},
            "versions": {name: version.facts for name, version in versions.items()},
            "model": options.model,
            "against_before": rows,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    work() if sys.argv[1:] == ["--worker"] else main()
