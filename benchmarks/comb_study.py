"""What trees are worth: tokens a pass by window and comb, and whether tokens are the plain loop's.

    python benchmarks/comb_study.py --count 64 --json benchmarks/results/scenes-comb-study.json

Passes are counted, no seconds: the figures do not depend on the machine. The drafts are those of
the coarse model that ships with the model.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

import mmaccel
from mmaccel.demo.scenes.data import EVALUATION_SEED, make_captions
from mmaccel.outputs.machine import describe_machine
from mmaccel.outputs.whole_files import write_whole

SHAPES = ((32, 0, 0), (64, 0, 0), (40, 6, 4), (40, 12, 7), (48, 16, 5))  # window, branches, length


def measure(pipe: Any, shape: tuple[int, int, int], options: dict[str, Any]) -> Any:
    """The images of one policy, in batches."""
    window, branches, length = shape
    tree = mmaccel.Comb(branches, length) if branches else None
    return pipe(policy=mmaccel.Jacobi(window, tree=tree), **options)


def main() -> None:
    """Measure, print a line for each row, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=64, help="fresh captions")
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0, 2.0])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    pipe = mmaccel.TextToImage.from_pretrained("scenes", device="cpu", compile=False)
    captions, rows = make_captions(EVALUATION_SEED, range(given.count)), []
    for scale in given.guidance:
        options: dict[str, Any] = {
            "prompt": captions, "seed": list(range(given.count)), "guidance_scale": scale,
            "batch_size": given.batch_size,
        }  # fmt: skip
        plain = pipe(policy=mmaccel.Autoregressive(), **options)
        for shape in SHAPES:
            made = measure(pipe, shape, options)
            passes = made.passes.double()
            a_pass = made.tokens.shape[1] / passes
            rows.append(
                {
                    "guidance": scale,
                    "window": shape[0],
                    "branches": shape[1],
                    "length": shape[2],
                    "drafts": shape[0] - 1 + shape[1] * shape[2],
                    "tokens_per_pass": float(made.tokens.numel() / passes.sum()),
                    "half_width": float(1.96 * a_pass.std() / given.count**0.5),
                    "identical": int((made.tokens == plain.tokens).all(1).sum()),
                }
            )
            print(rows[-1], flush=True)
    if given.json is not None:
        report = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": describe_machine("cpu"),
            "captions": given.count,
            "comb": rows,
        }
        text = json.dumps(report, indent=1) + "\n"
        write_whole(given.json, lambda path: path.write_text(text, encoding="utf-8"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
