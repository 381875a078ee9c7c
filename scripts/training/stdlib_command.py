"""The command of `stdlib`: data, byte pairs and training; a stopped run goes on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from scripts.training.generator import GeneratorTraining, train_generator
from scripts.training.stdlib import Stdlib, prepare

PARTS = ("stdlib",)


def main(part: str, arguments: Sequence[str]) -> None:
    """Reads the options and trains."""
    parser = argparse.ArgumentParser(prog=f"python -m scripts.training {part}", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/stdlib"), help="folder of the run")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--fall", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=8, help="pieces of 512 tokens")
    parser.add_argument("--mixed", action="store_true", help="bfloat16 where the device has it")
    args = parser.parse_args(arguments)
    prepare(args.work)
    cuda = torch.cuda.is_available()
    device = args.device if args.device != "auto" else "cuda" if cuda else "cpu"
    plan = GeneratorTraining(
        steps=args.steps, fall=args.fall, batch=args.batch, snapshots=(), mixed=args.mixed
    )
    train_generator(args.work, Stdlib(args.work), plan, device)
