"""What relaxed policies cost in quality and gain in passes, beside exact ones, on `scenes`.

    python -m benchmarks.relaxed_study --count 64 --work runs/relaxed-study \\
        --json benchmarks/results/scenes-relaxed-study.json --png docs/images/relaxed-pareto.png

For every policy: tokens a pass, the total variation it reports, the checker's share of captions
that are true of the images, and two Fréchet distances, from images that the plain loop makes of the
same captions with other seeds, and from the scenes that the captions were written for. Passes are
counted, no seconds: the figures do not depend on the machine.

Batches are kept in the folder `--work`, so that a run goes on where another was stopped.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import mmaccel
from mmaccel.contracts import Policy
from mmaccel.demo.scenes.checker import check_images
from mmaccel.demo.scenes.data import EVALUATION_SEED, make_captions, make_scenes
from mmaccel.demo.scenes.features import extract_features
from mmaccel.evaluation.quality.frechet import frechet_floor, frechet_of
from mmaccel.evaluation.quality.report import wilson
from mmaccel.outputs.machine import describe_machine
from mmaccel.outputs.whole_files import write_whole

OTHER_SEEDS = 10_000  # of the plain loop's images that all others are compared with
REFERENCE = "plain loop, other seeds"
POLICIES: dict[str, tuple[str, Policy]] = {  # label: family, policy
    REFERENCE: ("plain loop", mmaccel.Autoregressive()),
    "RowParallel(64, ahead=2)": ("RowParallel", mmaccel.RowParallel(64, 2)),
    "Jacobi(32)": ("exact", mmaccel.Jacobi(32)),
    "GroupedSpeculative(32, coarse)": (
        "GroupedSpeculative, ranks",
        mmaccel.GroupedSpeculative(32, drafts="coarse"),
    ),
    "RowParallel(64, ahead=0)": ("RowParallel", mmaccel.RowParallel(64, 0)),
    "RowParallel(64, ahead=1)": ("RowParallel", mmaccel.RowParallel(64, 1)),
    "GroupedSpeculative(32)": ("GroupedSpeculative, ranks", mmaccel.GroupedSpeculative(32)),
    "SpeculativeJacobi(32, coarse)": ("exact", mmaccel.SpeculativeJacobi(32, drafts="coarse")),
    "RowParallel(64, ahead=4)": ("RowParallel", mmaccel.RowParallel(64, 4)),
    "SpeculativeJacobi(32)": ("exact", mmaccel.SpeculativeJacobi(32)),
    "GroupedSpeculative(32, coarse, latent, cap=2)": (
        "GroupedSpeculative, latent",
        mmaccel.GroupedSpeculative(32, groups="latent", cap=2.0, drafts="coarse"),
    ),
    "GroupedSpeculative(32, coarse, latent, delta=0.1)": (
        "GroupedSpeculative, latent",
        mmaccel.GroupedSpeculative(32, groups="latent", drafts="coarse"),
    ),
    "Jacobi(64, DySpec(64))": ("exact", mmaccel.Jacobi(64, tree=mmaccel.DySpec(64))),
}


def make_batches(pipe: Any, work: Path, count: int, batch_size: int, guidance: float) -> None:
    """Decode what is not in the folder yet: a file for each policy and batch."""
    work.mkdir(parents=True, exist_ok=True)
    for number, (label, (_, policy)) in enumerate(POLICIES.items()):
        for first in range(0, count, batch_size):
            file = find_batch(work, label, first)
            if file.is_file():
                continue
            index = range(first, min(first + batch_size, count))
            seeds = [k + OTHER_SEEDS * (label == REFERENCE) for k in index]
            made = pipe(
                prompt=make_captions(EVALUATION_SEED, index),
                seed=seeds,
                guidance_scale=guidance,
                batch_size=batch_size,
                output_type="tokens",
                policy=policy,
            )
            held = {
                "tokens": made.tokens.numpy(),
                "passes": made.passes.numpy(),
                "variation": np.array(made.stats.total_variation),
            }
            write_whole(file, lambda path, held=held: _save(path, held))
            print(f"{number + 1} of {len(POLICIES)}: {label}, {index.stop} of {count}", flush=True)


def _save(path: Path, held: dict[str, Any]) -> None:
    with path.open("wb") as file:
        np.savez(file, **held)


def find_batch(work: Path, label: str, first: int) -> Path:
    """The file of a batch."""
    name = "".join(each if each.isalnum() else "-" for each in label)
    return work / f"{name}-{first}.npz"


def read_batches(work: Path, label: str, count: int, batch_size: int) -> dict[str, Any] | None:
    """Tokens `[N, L]`, passes `[N]` and total variation of a policy; None where batches lack."""
    files = [find_batch(work, label, first) for first in range(0, count, batch_size)]
    if not all(file.is_file() for file in files):
        return None
    parts = [np.load(file) for file in files]
    return {
        "tokens": torch.from_numpy(np.concatenate([part["tokens"] for part in parts])),
        "passes": torch.from_numpy(np.concatenate([part["passes"] for part in parts])).double(),
        "variation": float(sum(part["variation"] for part in parts)),
    }


def measure(
    made: dict[str, Any], images: Tensor, captions: list[str], against: dict[str, Any]
) -> dict[str, Any]:
    """Passes, the checker's verdict and distances of a policy's images.

    Args:
        made: see `read_batches`.
        images: `[N, C, H, W]` uint8.
        captions: of the images.
        against: features of other images of these captions, by what they are.
    """
    tokens = made["tokens"]
    passes = made["passes"]
    a_pass = tokens.shape[1] / passes
    verdicts = check_images(images.float() / 255, captions)
    share = sum(verdict.whole for verdict in verdicts) / len(captions)
    own = features_of(images)
    return {
        "tokens_per_pass": float(tokens.numel() / passes.sum()),
        "half_width": float(1.96 * a_pass.std() / len(passes) ** 0.5),
        "variation": made["variation"] / tokens.numel(),
        "whole": share,
        "interval": wilson(share, len(captions)),
        "frechet": {
            name: {
                "distance": frechet_of(own, theirs).distance,
                "floor": frechet_floor(own, theirs, seed=0),
            }
            for name, theirs in against.items()
        },
    }


def features_of(images: Tensor) -> Any:
    """Features `[N, D]` of images `[N, C, H, W]` uint8."""
    return extract_features(images).double().numpy()


def draw_plot(file: Path, report: dict[str, Any]) -> None:
    """Write the checker's share and the Fréchet distance against tokens a pass as PNG.

    Args:
        file: where.
        report: as the study writes it.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = report["relaxed_study"]
    for name, marker in zip(dict.fromkeys(row["family"] for row in rows), "xs^oDv", strict=False):
        own = sorted(
            (row for row in rows if row["family"] == name), key=lambda row: row["tokens_per_pass"]
        )
        gains = [row["tokens_per_pass"] for row in own]
        line = ":" if name in ("exact", "plain loop") else "-"
        look = {"marker": marker, "linestyle": line, "label": name}
        left.plot(gains, [100 * row["whole"] for row in own], **look)
        theirs = [row for row in own if row["frechet"].get("plain loop")]
        gains = [row["tokens_per_pass"] for row in theirs]
        right.plot(gains, [row["frechet"]["plain loop"]["distance"] for row in theirs], **look)
    plain = rows[0]
    low, high = (100 * bound for bound in plain["interval"])
    left.axhspan(low, high, color="#999999", alpha=0.12)
    floors = [row["frechet"]["plain loop"]["floor"] for row in rows[1:]]
    if floors:
        right.axhline(sum(floors) / len(floors), color="#999999", linestyle="--", label="floor")
    left.set(xlabel="tokens a pass", ylabel="captions that the checker finds true, %")
    right.set(xlabel="tokens a pass", ylabel="Fréchet distance from the plain loop's images")
    right.legend(fontsize=8)
    figure.suptitle(f"scenes, {report['captions']} captions, guidance {report['guidance']:g}")
    write_whole(file, lambda path: figure.savefig(path, format="png", dpi=110))


def main() -> None:
    """Decode, measure, and write what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=64, help="fresh captions")
    parser.add_argument("--guidance", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--work", type=Path, default=Path("runs/relaxed-study"))
    parser.add_argument("--measure-only", action="store_true", help="of the batches that are there")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    given = parser.parse_args()
    pipe = mmaccel.TextToImage.from_pretrained("scenes", device="cpu", compile=False)
    if not given.measure_only:
        make_batches(pipe, given.work, given.count, given.batch_size, given.guidance)
    _, captions, scenes = make_scenes(EVALUATION_SEED, range(given.count))
    against: dict[str, Any] = {"scenes": features_of(scenes)}
    rows: list[dict[str, Any]] = []
    for label, (family, _) in POLICIES.items():
        made = read_batches(given.work, label, given.count, given.batch_size)
        if made is None:
            continue
        images = (pipe.image_model.decode(made["tokens"]) * 255).round().to(torch.uint8)
        rows.append({"policy": label, "family": family, **measure(made, images, captions, against)})
        if label == REFERENCE:
            against["plain loop"] = features_of(images)
        print(rows[-1], flush=True)
    report = {
        "command": shlex.join(["python", "-m", "benchmarks.relaxed_study", *sys.argv[1:]]).replace(
            " --measure-only", ""
        ),
        "machine": describe_machine("cpu"),
        "captions": given.count,
        "guidance": given.guidance,
        "relaxed_study": rows,
    }
    if given.json is not None:
        text = json.dumps(report, indent=1) + "\n"
        write_whole(given.json, lambda path: path.write_text(text, encoding="utf-8"))
    if given.png is not None:
        draw_plot(given.png, report)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
