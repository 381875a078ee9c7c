"""Trains, exports and measures the embedded models.

    python scripts/train_demo.py tokenizer --work runs/scenes
    python scripts/train_demo.py data      --work runs/scenes
    python scripts/train_demo.py generator --work runs/scenes --steps 6000
    python scripts/train_demo.py export    --work runs/scenes
    python scripts/train_demo.py card      --work runs/scenes

`scenes-masked` learns from the same data, in a work folder of its own that holds `tokenizer/`,
`train.*` and `validation.*` of `scenes` (links will do); `grammar-masked` needs none:

    python scripts/train_demo.py masked  --work runs/masked --start mmaccel/demo/weights/scenes
    python scripts/train_demo.py grammar --work runs/grammar

Each has its `-export` and `-card`. The features of pictures are trained and measured by

    python scripts/train_demo.py features
    python scripts/train_demo.py features-card

Each command goes on where it was stopped. `generator` may be given more steps later.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from mmaccel.demo.features_measure import export_features_card
from mmaccel.demo.grammar_export import export_grammar, export_grammar_card
from mmaccel.demo.grammar_task import Grammar
from mmaccel.demo.masked_export import export_masked, export_masked_card
from mmaccel.demo.masked_scenes import MaskedScenes
from mmaccel.demo.picture_pool import make_pool
from mmaccel.demo.scenes_data import TRAIN_SEED
from mmaccel.demo.scenes_export import export_card, export_weights
from mmaccel.demo.scenes_task import Task
from mmaccel.demo.token_pool import encode_pool
from mmaccel.demo.train_features import train_features
from mmaccel.demo.train_generator import GeneratorTraining, train_generator
from mmaccel.demo.train_tokenizer import train_tokenizer

SHELF = Path(__file__).parent.parent / "mmaccel" / "demo" / "weights"
TRAINED = ("generator", "masked", "grammar")
EXPORTS = ("export", "masked-export", "grammar-export")
CARDS = ("card", "masked-card", "grammar-card")
PARTS = ("tokenizer", "data", *TRAINED, *EXPORTS, *CARDS, "features", "features-card")
NAMES = {"masked": "scenes-masked", "grammar": "grammar-masked", "features": "scenes-features"}


def main() -> None:
    """Reads the command line and runs one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument(
        "--work", type=Path, default=Path("runs/scenes"), help="folder for data, logs, checkpoints"
    )
    parser.add_argument("--target", type=Path, help="folder of the shipped weights")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--tokenizer-steps", type=int, default=2000)
    parser.add_argument("--pictures", type=int, default=120_000, help="distinct training pictures")
    parser.add_argument(
        "--steps", type=int, default=GeneratorTraining.steps, help="generator steps in all"
    )
    parser.add_argument(
        "--fall", type=int, default=GeneratorTraining.fall, help="last steps, of falling step size"
    )
    parser.add_argument("--compile", action="store_true", help="compile (needs a C compiler)")
    parser.add_argument("--start", help="folder of a trained generator to begin from")
    parser.add_argument("--begin", type=int, default=0, help="steps that --start was trained for")
    parser.add_argument(
        "--emphasis", type=int, default=1, help="draws of a left/right caption for one other"
    )
    parser.add_argument("--shift", type=int, default=1, help="masked: where slot i's logits stand")
    parser.add_argument("--power", type=float, default=1.0, help="masked: weight of short rows")
    parser.add_argument("--batch", type=int, default=GeneratorTraining.batch)
    parser.add_argument(
        "--captions", type=int, default=500, help="fresh captions, or prompts a task, for a card"
    )
    args = parser.parse_args()
    device = (
        ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    )
    target = args.target or SHELF / NAMES.get(args.part.split("-")[0], "scenes")
    if args.part == "tokenizer":
        train_tokenizer(args.work, steps=args.tokenizer_steps, device=device)
    elif args.part == "data":
        make_pool(args.work, "train", TRAIN_SEED, args.pictures)
        for name in ("train", "validation"):
            encode_pool(args.work, name, device)
    elif args.part in TRAINED:
        plan = GeneratorTraining(
            steps=args.steps,
            fall=args.fall,
            batch=args.batch,
            compiled=args.compile,
            start=args.start,
            begin=args.begin,
            emphasis=args.emphasis,
        )
        task: Task | None = None
        if args.part == "masked":
            task = MaskedScenes(args.work, args.emphasis, args.compile, args.shift, args.power)
        elif args.part == "grammar":
            args.work.mkdir(parents=True, exist_ok=True)
            task = Grammar(args.power)
        train_generator(args.work, plan, device, task)
    elif args.part == "features":
        train_features(target, args.work)
    elif args.part == "features-card":
        print(json.dumps(export_features_card(args.work, target), indent=2))
    elif args.part == "export":
        export_weights(args.work, target)
    elif args.part == "masked-export":
        export_masked(args.work, target, SHELF / "scenes")
    elif args.part == "grammar-export":
        export_grammar(args.work, target)
    else:
        measure = {"card": export_card, "masked-card": export_masked_card}
        card = measure.get(args.part, export_grammar_card)(args.work, target, args.captions, device)
        print(json.dumps(card, indent=2))


if __name__ == "__main__":
    main()
