"""How often Jacobi's drafts are right, by their distance, and what each draft source is worth.

    python benchmarks/draft_study.py --json benchmarks/results/scenes-draft-study.json

A draft is right if it is the token the slot ends with. Distance 0 is the first slot a pass has not
settled. Forward passes and tokens only, no seconds: the figures do not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mmaccel
from mmaccel.demo.scenes.data import EVALUATION_SEED, make_captions
from mmaccel.outputs.machine import describe_machine
from mmaccel.outputs.whole_files import write_whole
from mmaccel.results import Progress
from mmaccel.samplers.drafting.sources import SOURCES


def main() -> None:
    """Measures and writes the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="scenes")
    parser.add_argument("--count", type=int, default=16, help="fresh captions")
    parser.add_argument("--windows", default="16,32,64", help="with commas")
    parser.add_argument("--guidance", type=float, default=1.0)
    parser.add_argument("--json", type=Path, help="write the report here")
    args = parser.parse_args()
    pipe = mmaccel.TextToImage.from_pretrained(args.model, device="cpu", compile=False)
    captions = make_captions(EVALUATION_SEED, range(args.count))
    windows = [int(text) for text in args.windows.split(",")]
    corrected = ("auto", "coarse", "online")
    frames = ("previous-frame",)  # an image is one frame
    names = [name for name in SOURCES if name not in (*corrected, *frames)]
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "machine": describe_machine("cpu"),
        "model": args.model,
        "captions": captions,
        "guidance": args.guidance,
        "grid": [pipe.image_model.layout.rows, pipe.image_model.layout.width],
        "tokens_per_pass": [
            {"drafts": source, "window": window, "tokens_per_pass": round(gain, 3)}
            for source in names
            for window in windows
            for gain in [study(pipe, captions, window, source, args.guidance)[0]]
        ],
        "agreement": {
            str(window): [
                round(share, 3)
                for share in study(pipe, captions, window, "neighbour", args.guidance)[1]
            ]
            for window in windows
        },
    }
    text = json.dumps(report, indent=1) + "\n"
    print(text)
    if args.json is not None:
        write_whole(args.json, lambda path: path.write_text(text, encoding="utf-8"))


def study(
    pipe: mmaccel.TextToImage, captions: list[str], window: int, drafts: str, guidance: float
) -> tuple[float, list[float]]:
    """Tokens per pass, and the share of right drafts at each distance `[window - 1]`."""
    passes: list[tuple[Tensor, Tensor, Tensor]] = []

    def note(progress: Progress) -> None:
        passes.append((progress.tokens.clone(), progress.lengths, progress.previous))

    made = pipe(
        captions,
        policy=mmaccel.Jacobi(window, drafts),
        seed=list(range(len(captions))),
        guidance_scale=guidance,
        on_step=note,
    )
    length = made.tokens.shape[1]
    right, seen = torch.zeros(window - 1), torch.zeros(window - 1)
    distance = torch.arange(window - 1)[None]
    for tokens, lengths, previous in passes:
        slots = lengths[:, None] + distance  # [B, W-1]
        was_fed = (slots < previous[:, None] + window) & (slots < length)
        is_open = (previous < length)[:, None]
        inside = slots.clamp(max=length - 1)
        agrees = tokens.gather(1, inside) == made.tokens.gather(1, inside)
        counted = was_fed & is_open
        right += (agrees & counted).sum(0)
        seen += counted.sum(0)
    return made.stats.tokens_per_pass, (right / seen.clamp(min=1)).tolist()


if __name__ == "__main__":
    main()
