"""The commands of `stdlib`: train (a stopped run goes on), export the weights, measure the card."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from scripts.training.generator import GeneratorTraining, train_generator
from scripts.training.optim import choose_device
from scripts.training.stdlib import Stdlib, prepare
from scripts.training.stdlib_export import export_stdlib, export_stdlib_card

TARGET = Path(__file__).resolve().parents[2] / "mmaccel" / "demo" / "weights" / "stdlib"
PARTS = ("stdlib", "stdlib-export", "stdlib-card")


def main(part: str, arguments: Sequence[str]) -> None:
    """Reads the options of one of `PARTS` and runs it."""
    parser = argparse.ArgumentParser(prog=f"python -m scripts.training {part}", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/stdlib"), help="folder of the run")
    parser.add_argument("--target", type=Path, default=TARGET, help="folder of the shipped weights")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--fall", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=8, help="pieces a step")
    parser.add_argument("--length", type=int, default=512, help="tokens of a piece")
    parser.add_argument("--mixed", action="store_true", help="bfloat16 where the device has it")
    parser.add_argument("--note", action="append", default=[], help="of the card, a sentence")
    args = parser.parse_args(arguments)
    if part == "stdlib-export":
        export_stdlib(args.work, args.target)
        return
    if part == "stdlib-card":
        print(json.dumps(export_stdlib_card(args.work, args.target, args.note), indent=2))
        return
    prepare(args.work)
    device = choose_device(args.device)
    plan = GeneratorTraining(
        steps=args.steps, fall=args.fall, batch=args.batch, snapshots=(), mixed=args.mixed
    )
    train_generator(args.work, Stdlib(args.work, args.length), plan, device)
