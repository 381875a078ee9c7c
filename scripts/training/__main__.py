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

Each has its `-export` and `-card`. The features of images are trained and measured by

    python scripts/train_demo.py features
    python scripts/train_demo.py features-card

`scenes-vqa`, a vision-language model, is trained in three stages:

    python -m scripts.training vqa        --work runs/vqa --compile
    python -m scripts.training vqa-export --work runs/vqa
    python -m scripts.training vqa-card   --work runs/vqa

`recall`, a language model of long documents, is trained in three stages:

    python -m scripts.training recall        --work runs/recall
    python -m scripts.training recall-export --work runs/recall
    python -m scripts.training recall-card   --work runs/recall

`stdlib`, a language model of Python source, is trained on the standard library:

    python -m scripts.training stdlib        --work runs/stdlib
    python -m scripts.training stdlib-export --work runs/stdlib
    python -m scripts.training stdlib-card   --work runs/stdlib

`voices`, a text-to-speech model, has a codec of its own; espeak-ng makes what it learns from:

    python -m scripts.training voices-codec --work runs/voices
    python -m scripts.training voices-data  --work runs/voices
    python -m scripts.training voices-judge --work runs/voices
    python -m scripts.training voices       --work runs/voices

and then by `voices-depth`, `voices-export` and `voices-card`.

`moving-scenes`, a text-to-video model, is trained on clips that are drawn on the way:

    python -m scripts.training moving-scenes        --work runs/moving-scenes
    python -m scripts.training moving-scenes-export --work runs/moving-scenes
    python -m scripts.training moving-scenes-card   --work runs/moving-scenes

The features of clips and of speech, for Fréchet distances, are trained and measured by

    python -m scripts.training moving-scenes-features      --work runs/moving-scenes
    python -m scripts.training moving-scenes-features-card --work runs/moving-scenes
    python -m scripts.training voices-features             --work runs/voices
    python -m scripts.training voices-features-card        --work runs/voices

A coarse model for coarse drafts, of any model, is made by

    python -m scripts.training coarse scenes runs/coarse-scenes --guidance 1 2

(see `scripts/training/coarse.py`), and the head for EAGLE drafts of `stdlib` by

    python -m scripts.training eagle stdlib runs/head --modules

(`mmaccel train-head` makes one for any causal LM). Each goes on where it was stopped. `generator`
may be given more steps later.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from mmaccel.demo.scenes.data import TRAIN_SEED
from scripts.training import (
    coarse,
    eagle,
    moving_scenes_command,
    recall_command,
    stdlib_command,
    voices_command,
    vqa_command,
)
from scripts.training.data import encode_pool, make_pool
from scripts.training.export import (
    export_features_card,
    export_grammar,
    export_grammar_card,
    export_masked,
    export_masked_card,
    export_scenes,
    export_scenes_card,
)
from scripts.training.generator import GeneratorTraining, Task, train_generator
from scripts.training.grammar_masked import Grammar
from scripts.training.scenes import Scenes
from scripts.training.scenes_features import train_features
from scripts.training.scenes_masked import MaskedScenes
from scripts.training.scenes_tokenizer import train_tokenizer

WEIGHTS = Path(__file__).resolve().parents[2] / "mmaccel" / "demo" / "weights"
TRAINED = ("generator", "masked", "grammar")
EXPORTS = ("export", "masked-export", "grammar-export")
CARDS = ("card", "masked-card", "grammar-card")
PARTS = ("tokenizer", "data", *TRAINED, *EXPORTS, *CARDS, "features", "features-card")
NAMES = {"masked": "scenes-masked", "grammar": "grammar-masked", "features": "scenes-features"}


def main() -> None:
    """Reads the command line and runs one part."""
    own: dict[str, Callable[[list[str]], None]] = {"coarse": coarse.main, "eagle": eagle.main}
    own |= {
        part: partial(command.main, part)
        for command in (
            vqa_command,
            recall_command,
            stdlib_command,
            voices_command,
            moving_scenes_command,
        )
        for part in command.PARTS
    }
    if sys.argv[1:2] and sys.argv[1] in own:
        own[sys.argv[1]](sys.argv[2:])
        return
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
    parser.add_argument("--images", type=int, default=120_000, help="distinct training images")
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
    target = args.target or WEIGHTS / NAMES.get(args.part.split("-")[0], "scenes")
    if args.part == "tokenizer":
        train_tokenizer(args.work, steps=args.tokenizer_steps, device=device)
    elif args.part == "data":
        make_pool(args.work, "train", TRAIN_SEED, args.images)
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
        task: Task
        if args.part == "masked":
            task = MaskedScenes(args.work, args.emphasis, args.compile, args.shift, args.power)
        elif args.part == "grammar":
            args.work.mkdir(parents=True, exist_ok=True)
            task = Grammar(args.power)
        else:
            task = Scenes(args.work, args.emphasis, one_shape=args.compile)
        train_generator(args.work, task, plan, device)
    elif args.part == "features":
        train_features(target, args.work)
    elif args.part == "features-card":
        print(json.dumps(export_features_card(args.work, target), indent=2))
    elif args.part == "export":
        export_scenes(args.work, target)
    elif args.part == "masked-export":
        export_masked(args.work, target, WEIGHTS / "scenes")
    elif args.part == "grammar-export":
        export_grammar(args.work, target)
    else:
        measure = {"card": export_scenes_card, "masked-card": export_masked_card}
        card = measure.get(args.part, export_grammar_card)(args.work, target, args.captions, device)
        print(json.dumps(card, indent=2))


if __name__ == "__main__":
    main()
