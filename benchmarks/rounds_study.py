"""What parallel rounds of coarse drafts are worth: tokens a pass by window, rounds and tree.

    python -m benchmarks.rounds_study --count 16 --json benchmarks/results/scenes-rounds-study.json

Passes are counted, no seconds: the figures do not depend on the machine. The drafts are those of
the coarse model that ships with the model.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import mmaccel
from benchmarks.comb_study import count_passes, describe_call, write_study
from mmaccel.demo.scenes.data import EVALUATION_SEED, make_captions
from mmaccel.samplers.drafting.coarse import shipped_source

SHAPES: tuple[tuple[int, Any], ...] = (  # window, tree
    (32, None),
    (64, None),
    (40, mmaccel.Comb(6, 4)),
    (40, mmaccel.Comb(12, 7)),
)


def main() -> None:
    """Measure, print a line for each row, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=16, help="fresh captions")
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0, 2.0])
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 2, 3, 4, 6])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    pipe = mmaccel.TextToImage.from_pretrained("scenes", device="cpu", compile=False)
    shipped = shipped_source(pipe.model)
    assert shipped is not None
    captions = make_captions(EVALUATION_SEED, range(given.count))
    rows: list[dict[str, Any]] = []
    for scale in given.guidance:
        options = describe_call(captions, scale, given.batch_size)
        plain = pipe(policy=mmaccel.Autoregressive(), **options)
        for window, tree in SHAPES:
            for rounds in (None, *given.rounds):
                source = mmaccel.Coarse(shipped.folder, rounds=rounds)
                made = pipe(policy=mmaccel.Jacobi(window, source, tree), **options)
                rows.append(
                    {
                        "guidance": scale,
                        "window": window,
                        "tree": "none" if tree is None else f"Comb({tree.branches}, {tree.length})",
                        "rounds": rounds,
                        **count_passes(made, plain),
                    }
                )
                print(rows[-1], flush=True)
    write_study(given.json, given.count, "rounds_study", rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
