"""What trees are worth: tokens a pass by window and tree, and whether tokens are the plain loop's.

    python benchmarks/comb_study.py --count 64 --json benchmarks/results/scenes-comb-study.json
    python benchmarks/comb_study.py --shapes trees --count 16 --guidance 1 \\
        --json benchmarks/results/scenes-tree-study.json
    python -m benchmarks.comb_study --shapes tuned --count 16 --guidance 1 \\
        --json benchmarks/results/scenes-tuned-study.json
    python -m benchmarks.comb_study --shapes untrained --drafts online --count 16 --guidance 1 \\
        --json benchmarks/results/scenes-untrained-study.json

Passes are counted, no seconds: the figures do not depend on the machine. The drafts are those of
the coarse model that ships with the model, or of `--drafts`.
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

SHAPES: dict[str, tuple[tuple[int, Any], ...]] = {  # window, tree
    "comb": (
        (32, None),
        (64, None),
        (40, mmaccel.Comb(6, 4)),
        (40, mmaccel.Comb(12, 7)),
        (48, mmaccel.Comb(16, 5)),
    ),
    "trees": (  # 63 and 127 drafts
        (40, mmaccel.Comb(6, 4)),
        (48, mmaccel.Comb(16, 5)),
        (40, mmaccel.DySpec(24)),
        (48, mmaccel.DySpec(80)),
        (40, mmaccel.Sequoia(24)),
        (48, mmaccel.Sequoia(80)),
    ),
    "tuned": (  # the best found of 63 and of 127 drafts, and of 255
        (40, mmaccel.Comb(8, 3)),
        (44, mmaccel.DySpec(20, depth=10)),
        (64, mmaccel.DySpec(64)),
        (64, mmaccel.TETRIS(96, budget=64)),
        (48, mmaccel.ForkedComb(8, 6, 8, 4)),
        (64, mmaccel.SpecExec(192, depth=12, expand=48)),
    ),
    "untrained": (  # for --drafts online
        (48, None),
        (40, mmaccel.Comb(8, 3)),
        (48, mmaccel.DySpec(64)),
    ),
}


def open_scenes() -> Any:
    """The model, which has learned nothing from earlier passes."""
    return mmaccel.TextToImage.from_pretrained("scenes", device="cpu", compile=False)


def describe(tree: Any) -> dict[str, Any]:
    """A shape by its name and its size."""
    if tree is None:
        return {"tree": "none", "branches": 0, "length": 0}
    if isinstance(tree, mmaccel.Comb):
        name = f"Comb({tree.branches}, {tree.length})"
        return {"tree": name, "branches": tree.branches, "length": tree.length}
    if isinstance(tree, mmaccel.ForkedComb):
        own = f"{tree.branches}, {tree.length}, {tree.twigs}, {tree.twig_length}"
        return {"tree": f"ForkedComb({own})"}
    if isinstance(tree, mmaccel.TETRIS):
        return {"tree": f"TETRIS({tree.nodes}, budget={tree.budget})"}
    return {"tree": f"{type(tree).__name__}({tree.nodes})"}


def describe_call(captions: list[str], scale: float, batch_size: int) -> dict[str, Any]:
    """Arguments of a call of the pipeline: a seed for each caption."""
    return {
        "prompt": captions,
        "seed": list(range(len(captions))),
        "guidance_scale": scale,
        "batch_size": batch_size,
    }


def count_passes(made: Any, plain: Any) -> dict[str, Any]:
    """Tokens a pass of images, half of the 95 % interval, and how many are the plain loop's."""
    passes = made.passes.double()
    a_pass = made.tokens.shape[1] / passes
    return {
        "tokens_per_pass": float(made.tokens.numel() / passes.sum()),
        "half_width": float(1.96 * a_pass.std() / len(passes) ** 0.5),
        "identical": int((made.tokens == plain.tokens).all(1).sum()),
    }


def write_study(file: Path | None, count: int, name: str, rows: list[dict[str, Any]]) -> None:
    """Write rows with the command and the machine, where a file is given."""
    if file is None:
        return
    module = Path(sys.argv[0]).stem
    report = {
        "command": shlex.join(["python", "-m", f"benchmarks.{module}", *sys.argv[1:]]),
        "machine": describe_machine("cpu"),
        "captions": count,
        name: rows,
    }
    text = json.dumps(report, indent=1) + "\n"
    write_whole(file, lambda path: path.write_text(text, encoding="utf-8"))


def main() -> None:
    """Measure, print a line for each row, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=64, help="fresh captions")
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0, 2.0])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--shapes", choices=SHAPES, default="comb")
    parser.add_argument("--drafts", default="auto", help="their source; each row begins anew")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    captions = make_captions(EVALUATION_SEED, range(given.count))
    rows: list[dict[str, Any]] = []
    for scale in given.guidance:
        options = describe_call(captions, scale, given.batch_size)
        plain = open_scenes()(policy=mmaccel.Autoregressive(), **options)
        for window, tree in SHAPES[given.shapes]:
            policy = mmaccel.Jacobi(window, drafts=given.drafts, tree=tree)
            made = open_scenes()(policy=policy, **options)
            rows.append(
                {
                    "guidance": scale,
                    "window": window,
                    **describe(tree),
                    "source": given.drafts,
                    "drafts": window - 1 + (0 if tree is None else tree.nodes),
                    **count_passes(made, plain),
                }
            )
            print(rows[-1], flush=True)
    write_study(given.json, given.count, given.shapes, rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
