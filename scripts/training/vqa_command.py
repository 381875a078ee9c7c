"""The commands of `scenes-vqa`: train all stages, export the weights, measure the card."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from scripts.training.optim import choose_device
from scripts.training.vqa import PLANS, STAGES, train_vqa
from scripts.training.vqa_export import export_vqa, export_vqa_card

TARGET = Path(__file__).resolve().parents[2] / "mmaccel" / "demo" / "weights" / "scenes-vqa"
PARTS = ("vqa", "vqa-export", "vqa-card")


def main(part: str, arguments: Sequence[str]) -> None:
    """Reads the options of one of `PARTS` and runs it."""
    parser = argparse.ArgumentParser(prog=f"python -m scripts.training {part}", description=__doc__)
    parser.add_argument(
        "--work", type=Path, default=Path("runs/vqa"), help="folder for logs and checkpoints"
    )
    parser.add_argument("--target", type=Path, default=TARGET, help="folder of the shipped weights")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--compile", action="store_true", help="compile (needs a C compiler)")
    parser.add_argument("--batch", type=int, default=8, help="images a step")
    parser.add_argument("--workers", type=int, default=0, help="processes that draw images")
    parser.add_argument("--questions", type=int, default=500, help="of each kind, for the card")
    parser.add_argument("--note", action="append", default=[], help="of the card, a sentence")
    for stage in STAGES:
        parser.add_argument(f"--{stage}-steps", type=int, default=PLANS[stage].steps)
        parser.add_argument(f"--{stage}-fall", type=int, default=PLANS[stage].fall)
    args = parser.parse_args(arguments)
    if part == "vqa":
        options = vars(args)
        common = {"batch": args.batch, "workers": args.workers}
        plans = {
            s: replace(PLANS[s], steps=options[f"{s}_steps"], fall=options[f"{s}_fall"], **common)
            for s in STAGES
        }
        device = choose_device(args.device)
        train_vqa(args.work, plans, device, args.compile)
    elif part == "vqa-export":
        export_vqa(args.work, args.target)
    else:
        card = export_vqa_card(args.work, args.target, args.questions, args.note)
        print(json.dumps(card, indent=2))
