"""What continuous batching gains: the next prompt takes the batch slot of a finished row.

    python benchmarks/continuous_batching.py --json benchmarks/results/scenes-cpu-continuous.json

- continuous: `TextToImage.serve`, that many batch slots, taken by all captions one after another;
- batches: `TextToImage.stream`, fixed batches of so many, each as long as its slowest row;
- singles: the same with one row;
- library: transformers' `generate` of the same model, image by image.

All run on the same captions (caption k has seed k) under the same guidance, in turn, the order
turning from round to round. The first three have to make the same tokens, or the script stops.
Seconds are those of tokens; rendering is left out. Passes and positions are counted at the model by
a hook: rows times width of all passes, prompts included. On a CPU, positions decide;
they do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import mmaccel
from benchmarks.route_runs import Routes, Way
from mmaccel.catalog import make_policy
from mmaccel.contracts import Policy
from mmaccel.demo.scenes.data import EVALUATION_SEED, make_captions
from mmaccel.options import parse_fields
from mmaccel.outputs.machine import describe_machine
from mmaccel.outputs.whole_files import write_whole
from mmaccel.samplers.sampling_params import SamplingParams


@dataclass
class Job:
    """All captions made in one way.

    Attributes:
        seconds: of each round.
        passes, positions: of one round, as the model saw them.
        tokens: by caption; empty for the library, whose draws are its own.
        row_passes: by caption, passes each image took part in.
    """

    seconds: list[float] = field(default_factory=list)
    passes: int = 0
    positions: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    row_passes: dict[int, int] = field(default_factory=dict)


class Bench:
    """The model twice, as the pipeline and as transformers load it, and counts of its passes."""

    def __init__(self, name: str, captions: list[str], guidance: float) -> None:
        self.routes, self.captions, self.guidance = Routes(name), captions, guidance
        self.pipe = self.routes.pipe
        self.params = SamplingParams(guidance_scale=guidance)
        self._counts = [0, 0]
        for model in (self.routes.model, self.pipe.model.model):  # type: ignore[union-attr]
            model.register_forward_pre_hook(self._count, with_kwargs=True)

    def run(self, way: str, policy: Policy | None, rows: int, job: Job) -> None:
        """One round of a job."""
        ways: dict[str, Callable[[], float]] = {
            "continuous": lambda: self._continuous(policy, rows, job),
            "batches": lambda: self._batches(policy, rows, job),
            "singles": lambda: self._batches(policy, 1, job),
            "library": self._library,
        }
        self._counts[:] = 0, 0
        job.seconds.append(ways[way]())
        job.passes, job.positions = self._counts

    def _count(self, _: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        ids = options["input_ids"] if "input_ids" in options else args[0]
        self._counts[0] += 1
        self._counts[1] += ids.numel()

    def _continuous(self, policy: Policy | None, rows: int, job: Job) -> float:
        def deliver(served: mmaccel.RequestOutput) -> None:
            job.tokens[served.request.tag] = served.tokens.tolist()
            job.row_passes[served.request.tag] = served.passes

        asked = [mmaccel.Request(text, k, k) for k, text in enumerate(self.captions)]
        stats = self.pipe.serve(asked, self.params, policy=policy, rows=rows, deliver=deliver)
        return stats.seconds

    def _batches(self, policy: Policy | None, rows: int, job: Job) -> float:
        seeds, seconds = list(range(len(self.captions))), 0.0
        options = dict(policy=policy, seed=seeds, batch_size=rows)
        for part in self.pipe.stream(self.captions, self.params, **options):  # type: ignore[arg-type]
            seconds += part.stats.seconds
            for k, tokens in enumerate(part.tokens.tolist()):
                job.tokens[part.first + k] = tokens
                job.row_passes[part.first + k] = int(part.passes[k])
        return seconds

    def _library(self) -> float:
        way, began = Way("library", None, 1, self.guidance), time.perf_counter()
        for k, text in enumerate(self.captions):
            self.routes.run(way, [text], [k])
        return time.perf_counter() - began


def summarize(name: str, policy: Policy, rows: int, jobs: dict[str, Job]) -> dict[str, Any]:
    """One policy at one number of rows, in all ways; the best round of each counts."""
    continuous, batches, singles = (jobs[way] for way in ("continuous", "batches", "singles"))
    for job in (batches, singles):
        if job.tokens != continuous.tokens:
            raise SystemExit(f"{name}, {policy!r}: the tokens are not the same")
    passes = [continuous.row_passes[k] for k in sorted(continuous.row_passes)]
    groups = [passes[k : k + rows] for k in range(0, len(passes), rows)]
    best = {way: min(job.seconds) for way, job in jobs.items() if job.seconds}
    return {
        "policy": repr(policy),
        "rows": rows,
        "ragged": {
            "passes_of_a_picture": [min(passes), statistics.fmean(passes), max(passes)],
            "spread": statistics.pstdev(passes),
            "slowest_of_a_batch_to_mean": sum(max(group) * len(group) for group in groups)
            / sum(passes),
        },
        "ways": {
            way: {"seconds": job.seconds, "passes": job.passes, "positions": job.positions}
            for way, job in jobs.items()
            if job.seconds
        },
        "positions_of_batches_to_continuous": batches.positions / continuous.positions,
        "passes_of_batches_to_continuous": batches.passes / continuous.passes,
        "speed_up": {way: best[way] / best["continuous"] for way in best if way != "continuous"},
    }


def main() -> None:
    """Measures and writes the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="scenes")
    parser.add_argument("--count", type=int, default=64, help="fresh captions")
    parser.add_argument("--rows", default="8,16", help="with commas")
    parser.add_argument("--windows", default="32,16,1", help="with commas; 1 is Autoregressive")
    parser.add_argument("--policy", help="short name, instead of windows")
    parser.add_argument("--set", action="append", default=[], help="a field of it as name=value")
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--no-library", action="store_true", help="leave transformers' loop out")
    parser.add_argument("--json", type=Path, help="write the report here")
    options = parser.parse_args()
    captions = make_captions(EVALUATION_SEED, range(options.count))
    bench = Bench(options.model, captions, options.guidance)
    sizes = [int(text) for text in options.rows.split(",")]
    policies: list[Policy] = [
        mmaccel.Jacobi(int(w)) if int(w) > 1 else mmaccel.Autoregressive()
        for w in options.windows.split(",")
    ]
    if options.policy is not None:
        policies = [
            make_policy(options.policy, **parse_fields("--set", options.set, "--set gamma=0.2"))
        ]
    cells: dict[tuple[str, int, int], Job] = {}  # way, policy, rows
    if not options.no_library:
        cells["library", -1, 1] = Job()
    for at in range(len(policies)):
        cells["singles", at, 1] = Job()
        cells |= {(way, at, n): Job() for n in sizes for way in ("continuous", "batches")}
    order = list(cells)
    for turn in range(options.repeat):
        for way, at, rows in order[turn:] + order[:turn]:
            bench.run(way, None if at < 0 else policies[at], rows, cells[way, at, rows])
            shown = (way, policies[at] if at >= 0 else "", rows, cells[way, at, rows].seconds[-1])
            print(*shown, file=sys.stderr)
    report = {
        "command": " ".join(["python", *sys.argv]),
        "machine": describe_machine("cpu"),
        "model": options.model,
        "captions": captions,
        "guidance": options.guidance,
        "dtype": "float32",
        "cells": [
            summarize(
                options.model,
                policies[at],
                rows,
                {
                    "continuous": job,
                    "batches": cells["batches", at, rows],
                    "singles": cells["singles", at, 1],
                    "library": cells.get(("library", -1, 1), Job()),
                },
            )
            for (way, at, rows), job in cells.items()
            if way == "continuous"
        ],
    }
    print(text := json.dumps(report, indent=1) + "\n")
    if options.json is not None:
        write_whole(options.json, lambda path: path.write_text(text, encoding="utf-8"))


if __name__ == "__main__":
    main()
