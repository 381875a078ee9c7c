"""The commands of `recall`: train all stages, export the weights, measure the card."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from scripts.training.optim import choose_device
from scripts.training.recall import PLANS, STAGES, train_recall
from scripts.training.recall_export import export_recall, export_recall_card

TARGET = Path(__file__).resolve().parents[2] / "mmaccel" / "demo" / "weights" / "recall"
PARTS = ("recall", "recall-export", "recall-card")


def main(part: str, arguments: Sequence[str]) -> None:
    """Reads the options of one of `PARTS` and runs it."""
    parser = argparse.ArgumentParser(prog=f"python -m scripts.training {part}", description=__doc__)
    parser.add_argument(
        "--work", type=Path, default=Path("runs/recall"), help="folder for logs and checkpoints"
    )
    parser.add_argument("--target", type=Path, default=TARGET, help="folder of the shipped weights")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--compile", action="store_true", help="compile (needs a C compiler)")
    parser.add_argument("--questions", type=int, default=200, help="of each task, for the card")
    parser.add_argument("--note", action="append", default=[], help="of the card, a sentence")
    for stage in STAGES:
        plan = PLANS[stage]
        parser.add_argument(f"--{stage}-steps", type=int, default=plan.steps)
        parser.add_argument(f"--{stage}-fall", type=int, default=plan.fall)
        parser.add_argument(f"--{stage}-batch", type=int, default=plan.batch, help="in tokens")
    args = parser.parse_args(arguments)
    options = vars(args)
    if part == "recall":
        plans = {
            stage: replace(
                PLANS[stage],
                steps=options[f"{stage}_steps"],
                fall=options[f"{stage}_fall"],
                batch=options[f"{stage}_batch"],
            )
            for stage in STAGES
        }
        device = choose_device(args.device)
        train_recall(args.work, plans, device, args.compile)
    elif part == "recall-export":
        export_recall(args.work, args.target)
    else:
        card = export_recall_card(args.work, args.target, args.questions, args.note)
        print(json.dumps(card, indent=2))
