"""Milliseconds of a pass inside and outside the model's forward: what a policy's own work costs.

Every policy decodes the same images at every window, in turn within one process, so that what else
the machine does falls on all. A pass is a step of a run with all that belongs to it: drafts,
forward, guidance and filters, noise, acceptance, counters and the host's synchronisation. As noise
is made in advance, now and then for many slots, an image counts with the mean of its passes, and a
policy with the median of its images.

    python benchmarks/sampler_share.py --count 8 --json benchmarks/results/scenes-cpu-sampler.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch

from mmaccel import TextToImage
from mmaccel.catalog import make_policy
from mmaccel.demo.scenes.data import EVALUATION_SEED, make_captions
from mmaccel.outputs.machine import describe_machine
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.run import WindowRun

CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}


class Pass(NamedTuple):
    """Seconds of one pass."""

    forward: float
    other: float


class Cell(NamedTuple):
    """What is measured together."""

    guidance: float
    policy: str
    window: int
    drafts: str | None


class TimedRun(WindowRun):
    """A run that times its passes, and the model's forward in each."""

    clock: Callable[[], float]
    passes: list[Pass]

    def run_step(self, step_fn: Callable[[], None]) -> None:
        forward, spent = self.model.forward, 0.0

        def timed(*args: Any) -> Any:
            nonlocal spent
            began = self.clock()
            logits = forward(*args)
            spent += self.clock() - began
            return logits

        self.model.forward = timed  # type: ignore[method-assign]
        try:
            began = self.clock()
            super().run_step(step_fn)
            self.passes.append(Pass(spent, self.clock() - began - spent))
        finally:
            del self.model.forward


@torch.no_grad()
def decode(pipe: TextToImage, cell: Cell, caption: str, seed: int, clock: str) -> list[Pass]:
    """The passes of one image."""
    own = {} if cell.drafts is None else {"drafts": cell.drafts}
    policy = make_policy(cell.policy, window=cell.window, **own)
    image_model = pipe.image_model
    prompt = image_model.prompt([image_model.encode(caption)], cell.guidance != 1)
    params = SamplingParams(guidance_scale=cell.guidance)
    noise = Noise.from_seed([seed], 1)
    run = TimedRun(policy, image_model.window, prompt, pipe.length, params=params, noise=noise)
    run.clock, run.passes = CLOCKS[clock], []
    policy.decode(run)
    return run.passes


def summarise(cell: Cell, images: list[list[Pass]]) -> dict[str, Any]:
    """Milliseconds of a pass, and the share of what is not the forward."""
    forward = 1000 * median(mean(one.forward for one in passes) for passes in images)
    other = 1000 * median(mean(one.other for one in passes) for passes in images)
    return {
        **cell._asdict(),
        "passes": mean(map(len, images)),
        "forward_ms": forward,
        "sampler_ms": other,
        "share": other / (forward + other),
    }


def main() -> None:
    """Measure all cells image by image; print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="scenes", help="demo model or folder")
    parser.add_argument(
        "--policies",
        nargs="+",
        default=["jacobi:neighbour", "jacobi:coarse", "mc-sjd", "gsd"],
        help="short names; after a colon, the draft source",
    )
    parser.add_argument("--windows", type=int, nargs="+", default=[32])
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0, 2.0])
    parser.add_argument("--count", type=int, default=4, help="images of each")
    parser.add_argument("--fused", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: of this thread, on busy machines"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    pipe = TextToImage.from_pretrained(
        options.model, dtype=dtype, fused=options.fused, compile=False
    )
    named = [name.partition(":")[::2] for name in options.policies]
    images: dict[Cell, list[list[Pass]]] = {
        Cell(scale, name, window, drafts or None): []
        for scale in options.guidance
        for name, drafts in named
        for window in options.windows
    }
    captions = make_captions(EVALUATION_SEED, range(options.count))
    for seed, caption in enumerate(captions[:1] + captions, -1):
        for cell, found in images.items():
            own = decode(pipe, cell, caption, max(seed, 0), options.clock)
            if seed >= 0:  # the first one is to warm up
                found.append(own)
    rows = [summarise(cell, found) for cell, found in images.items()]
    print("guidance  policy                    window   forward ms   sampler ms   share")
    for row in rows:
        name = row["policy"] + (f", {row['drafts']}" if row["drafts"] else "")
        print(
            f"{row['guidance']:8g}  {name:24}  {row['window']:6}   {row['forward_ms']:10.2f}"
            f"   {row['sampler_ms']:10.2f}   {100 * row['share']:4.1f} %"
        )
    if options.json is not None:
        report = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": describe_machine(str(pipe.image_model.window.device)),
            "model": options.model,
            "dtype": options.dtype,
            "fused": options.fused,
            "clock": options.clock,
            "images": len(captions),
            "sampler_share": rows,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
