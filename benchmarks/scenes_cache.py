"""Images of `scenes` with a part of the cache: what the prompt checker says of them.

    python benchmarks/scenes_cache.py --count 400 --json benchmarks/results/scenes-cache-cpu.json

Captions of one test set, the same seeds for every way, guidance 1. A way keeps a budget of entries
in a layer, in rounds of a row of 16 tokens; between two rounds a layer holds up to three rows more.
Intervals are Wilson's, of 95 %; "lost" and "gained" pair the ways: captions that are right with the
whole cache and wrong with less, and the other way round.
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

import mmaccel
from mmaccel.demo.scenes.checker import check_images
from mmaccel.demo.scenes.data import make_captions
from mmaccel.evaluation.quality.report import wilson
from mmaccel.outputs.machine import describe_machine

_SEED = 91  # of captions that no model was trained on
_ROW = 16  # tokens of a row of the image
_TOKENS = 256  # tokens of an image


def make_ways(whole: int, prompt: int, shares: list[float]) -> dict[str, Any]:
    """Cache methods at shares of an image's entries, and the whole cache."""
    ways: dict[str, Any] = {"whole": None}
    for share in shares:
        budget = round(share * whole)
        sinks = min(prompt, budget - _ROW - 4)
        given = {"budget": budget, "every": _ROW}
        ways |= {
            f"LineKV, {share:g}": mmaccel.LineKV(**given, lines=1, sinks=sinks),
            f"StreamingLLM, {share:g}": mmaccel.StreamingLLM(**given, sinks=sinks),
            f"StreamingLLM without the prompt, {share:g}": mmaccel.StreamingLLM(**given, sinks=4),
            f"MorphKV, {share:g}": mmaccel.MorphKV(**given, window=_ROW),
            f"TOVA, {share:g}": mmaccel.TOVA(**given),
            f"KeyDiff, {share:g}": mmaccel.KeyDiff(**given),
            f"RandomEviction, {share:g}": mmaccel.RandomEviction(**given),
        }
    return ways


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every way."""
    pipe = mmaccel.TextToImage.from_pretrained("scenes", device="cpu", dtype="float32")
    captions = make_captions(_SEED, range(arguments.count))
    prompts = pipe.image_model.prompt([pipe.image_model.encode(text) for text in captions], False)
    prompt = int(prompts.lengths.max())
    whole = prompt + _TOKENS
    rows, right = [], torch.zeros(0)
    for name, method in make_ways(whole, prompt, arguments.shares).items():
        pixels = []
        passes = 0
        for first in range(0, len(captions), arguments.batch):
            part = captions[first : first + arguments.batch]
            made = pipe(
                part,
                policy=mmaccel.Jacobi(window=8),
                seed=range(first, first + len(part)),
                kv_cache=method,
            )
            pixels += [torch.from_numpy(np.array(image)) for image in made.images]  # [H, W, 3]
            passes += made.stats.row_passes
        images = torch.stack(pixels).permute(0, 3, 1, 2).float() / 255
        verdicts = check_images(images, captions)
        own = torch.tensor([verdict.whole for verdict in verdicts])
        right = own if method is None else right
        share = float(own.float().mean())
        rows.append(
            {
                "way": name,
                "method": repr(method),
                "count": len(captions),
                "right": share,
                "interval": wilson(share, len(captions)),
                "lost": int((right & ~own).sum()),
                "gained": int((~right & own).sum()),
                "budget_share": 1.0 if method is None else method.budget / whole,
                "tokens_a_pass": len(captions) * _TOKENS / passes,
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.25])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = measure(arguments)
    if arguments.json is not None:
        report = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": describe_machine("cpu") | {"threads": arguments.threads},
            "scenes_cache": rows,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
