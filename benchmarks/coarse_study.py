"""What coarse drafts are worth, by window, candidates, and coarse model.

    python benchmarks/coarse_study.py --coarse runs/c1,runs/c2 --count 64 \\
        --json benchmarks/results/scenes-coarse-study.json

Token by token, the neighbour source and every coarse model run image by image in a rotating order,
batch 1. Drafts learned online run beside the neighbour source, from nothing for each window and
guidance scale. The card of a coarse model says how large it is, how long it was trained, and its
cross-entropy; the report repeats it. Sweep: median time between two passes that drafts need, as a
share of a pass.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import mmaccel  # noqa: E402
from benchmarks.coarse_tables import coarse_study_tables  # noqa: E402
from mmaccel.commands.bench.measure import measure_images  # noqa: E402
from mmaccel.demo.scenes.data import EVALUATION_SEED, make_captions  # noqa: E402
from mmaccel.evaluation.speed.measure import Side  # noqa: E402
from mmaccel.outputs.machine import describe_machine  # noqa: E402
from mmaccel.outputs.whole_files import write_whole  # noqa: E402
from mmaccel.pipelines.text_to_image.model import choose_params  # noqa: E402
from mmaccel.samplers.drafting.coarse_drafter import CoarseDrafter  # noqa: E402
from mmaccel.samplers.drafting.coarse_model import describe_coarse  # noqa: E402
from mmaccel.samplers.sampling_params import SamplingParams  # noqa: E402

_CANDIDATES = mmaccel.Coarse("").candidates
Seconds = dict[tuple[str, float], dict[str, list[float]]]  # (policy, guidance) -> method -> calls


def main() -> None:
    """Measures and writes the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="scenes")
    parser.add_argument("--coarse", required=True, help="folders with commas")
    parser.add_argument("--count", type=int, default=64, help="fresh captions")
    parser.add_argument("--windows", default="16,32,64", help="with commas")
    parser.add_argument(
        "--candidates", default=str(_CANDIDATES), help="with commas; the first folder alone"
    )
    parser.add_argument(
        "--rounds", default="", help="parallel rounds, with commas; the first folder alone"
    )
    parser.add_argument("--guidance", default="1,2", help="with commas")
    parser.add_argument("--online", default="", help="windows of drafts='online', with commas")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the report here")
    args = parser.parse_args()
    folders, windows = args.coarse.split(","), [int(text) for text in args.windows.split(",")]
    coarse = {folder: describe_coarse(folder) for folder in folders}
    policies = list_policies(
        folders,
        windows,
        [int(text) for text in args.candidates.split(",")],
        [int(text) for text in filter(None, args.rounds.split(","))],
    )
    pipe = mmaccel.TextToImage.from_pretrained(args.model, device="cpu", compile=False)
    captions = make_captions(EVALUATION_SEED, range(args.count))
    params = [
        choose_params(
            pipe.image_model.params, guidance_scale=float(text), temperature=args.temperature
        )
        for text in args.guidance.split(",")
    ]
    with timed_sweeps() as seconds:
        sides = [Side(name, pipe, policy, own) for own in params for name, policy in policies]
        rows = measure_images(sides, captions, args.seed, 1)
        learned = [
            measure_online(args.model, captions, int(window), own, args.seed)
            for own in params
            for window in filter(None, args.online.split(","))
        ]
    report = {
        "command": " ".join(["python", *sys.argv]),
        "machine": describe_machine("cpu"),
        "model": args.model,
        "captions": captions,
        "temperature": params[0].temperature,
        "seed": args.seed,
        "coarse": coarse,
        "coarse_study": [
            {
                **row,
                "candidates": getattr(side.policy.drafts, "candidates", None),
                "rounds": getattr(side.policy.drafts, "rounds", None),
                "sweep_share": share_of_a_pass(row, seconds),
            }
            for row, side in zip(rows, sides, strict=True)
            if side.name == "jacobi"
        ]
        + [
            {
                **row,
                "candidates": None,
                "sweep_share": share_of_a_pass(row, seconds),
                "neighbour_seconds": beside,
            }
            for row, beside in learned
        ],
    }
    if args.json is not None:
        text = json.dumps(report, indent=1) + "\n"
        write_whole(args.json, lambda path: path.write_text(text, encoding="utf-8"))
    print(coarse_study_tables({"study": report}))


def list_policies(
    folders: list[str], windows: list[int], candidates: list[int], rounds: list[int]
) -> list[tuple[str, Any]]:
    """What runs: token by token, then Jacobi by window, draft source, candidates and rounds.

    Further numbers of candidates, and parallel rounds, are for the first folder alone.
    """
    sources: list[Any] = ["neighbour", *(mmaccel.Coarse(folder) for folder in folders)]
    more = [mmaccel.Coarse(folders[0], n) for n in candidates if n != _CANDIDATES]
    more += [mmaccel.Coarse(folders[0], rounds=n) for n in rounds]
    return [
        ("autoregressive", mmaccel.Autoregressive()),
        *(
            ("jacobi", mmaccel.Jacobi(window, source))
            for window in windows
            for source in (*sources, *more)
        ),
    ]


def measure_online(
    model: str, captions: list[str], window: int, params: SamplingParams, seed: int
) -> tuple[dict[str, Any], float]:
    """Drafts that a newly loaded model learns, and the seconds an image of the neighbour source."""
    pipe = mmaccel.TextToImage.from_pretrained(model, device="cpu", compile=False)
    sides = [
        Side("jacobi", pipe, mmaccel.Jacobi(window, drafts), params)
        for drafts in ("neighbour", "online")
    ]
    neighbour, online = measure_images(sides, captions, seed, 1)
    return online, neighbour["seconds"]


@contextmanager
def timed_sweeps() -> Iterator[Seconds]:
    """Time every call between two passes that coarse drafts need."""
    seconds: Seconds = defaultdict(lambda: defaultdict(list))
    originals = {name: getattr(CoarseDrafter, name) for name in ("redraft", "record")}
    try:
        for name, original in originals.items():
            setattr(CoarseDrafter, name, _timed(name, original, seconds))
        yield seconds
    finally:
        for name, original in originals.items():
            setattr(CoarseDrafter, name, original)


def _timed(name: str, original: Callable[..., Any], seconds: Seconds) -> Callable[..., Any]:
    def call(self: CoarseDrafter, run: Any, *args: Any) -> Any:
        began = time.perf_counter()
        found = original(self, run, *args)
        key = (run.stats.policy, run.params.guidance_scale)
        seconds[key][name].append(time.perf_counter() - began)
        return found

    return call


def share_of_a_pass(row: dict[str, Any], seconds: Seconds) -> float | None:
    """Median time of a sweep over the mean time of a forward pass; None without sweeps."""
    of_row = seconds.get((row["settings"], row["guidance"]))
    if of_row is None:
        return None
    sweep = sum(statistics.median(calls) for calls in of_row.values())
    return sweep / (row["seconds"] * (1 - row["sampler_share"]) / row["passes"])


if __name__ == "__main__":
    main()
