"""Trains a model of `mmaccel/demo/weights` or `weights`, writes its folder and its card.

    python -m scripts.training NAME
    python -m scripts.training scenes-vqa --stage full --set steps=650 --set batch=4

goes through the stages of NAME, each in a folder of `--work`, and goes on where it was stopped.
`voices` needs espeak-ng, which only makes data: `pip install espeakng-loader`. A coarse model for
coarse drafts, of any model, is made by `python -m scripts.training coarse`, and the head for EAGLE
drafts of `stdlib` by `python -m scripts.training eagle` (`mmaccel train-head` makes one for any
causal LM). How the weights that ship were made stands in their cards, with the commit.
"""

from __future__ import annotations

import argparse
import ast
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from scripts.training import coarse, eagle
from scripts.training.card import export
from scripts.training.loop import train
from scripts.training.models import MODELS


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["coarse"] or arguments[:1] == ["eagle"]:
        own = coarse.main if arguments[0] == "coarse" else eagle.main
        own(arguments[1:])
        return
    parser = argparse.ArgumentParser(
        prog="python -m scripts.training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=[*MODELS, "coarse", "eagle"])
    parser.add_argument("--work", type=Path, help="folder of the run; runs/NAME if missing")
    parser.add_argument("--target", type=Path, help="folder of the shipped weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--stage", help="this stage alone, and nothing is exported")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="of every stage's plan"
    )
    args = parser.parse_args(arguments)
    model = MODELS[args.name]
    work = args.work or Path("runs") / args.name
    fields = dict(pair.split("=", 1) for pair in args.set)
    changes = {name: ast.literal_eval(value) for name, value in fields.items()}
    stages = list(model.plans)
    for stage, before in zip(stages, [None, *stages], strict=False):
        if args.stage in (None, stage):
            task = model.open(stage, work, args.device)
            plan = replace(model.plans[stage], **changes)
            train(work / stage, task, plan, args.device, work / before if before else None)
    if args.stage is None:
        command = shlex.join(["python", "-m", "scripts.training", *arguments])
        export(args.name, model, work, args.target or model.home / args.name, command)


if __name__ == "__main__":
    main(sys.argv[1:])
