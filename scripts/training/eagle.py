"""Makes the EAGLE head of `stdlib`, from the standard library's modules.

    python -m scripts.training eagle OUT

Of any other model and texts `mmaccel train-head` makes one, by the same training.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from mmaccel.options import HeadTraining
from mmaccel.samplers.drafting.heads.eagle_training import make_head
from scripts.training.card import this_machine
from scripts.training.stdlib import open_stdlib, read_modules


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.training eagle", description=__doc__)
    parser.add_argument("out", type=Path, help="folder for the head")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, nargs=3)
    parser.add_argument("--mixed", action="store_true", help="bfloat16")
    for name in ("steps", "batch", "length", "ahead", "inner", "draft-vocab", "rate"):
        default = getattr(HeadTraining, name.replace("-", "_"))
        kind = float if name == "rate" else int
        parser.add_argument(f"--{name}", type=kind, default=default)
    args = vars(parser.parse_args(arguments))
    names = [each.name for each in fields(HeadTraining) if each.name in args]
    plan = HeadTraining(**{name: args[name] for name in names})
    model, tokenizer = open_stdlib()
    texts = [module.text for module in read_modules() if not module.is_held_out]
    facts = {
        "made_for": "stdlib",
        "command": shlex.join(["python", "-m", "scripts.training", "eagle", *arguments]),
        "measured_with": this_machine(args["device"]),
    }
    model.to(args["device"])
    make_head(model, tokenizer, texts, plan, args["out"], work=None, facts=facts)
