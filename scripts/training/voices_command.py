"""The commands of `voices`: data and codec, both models, the judge, export, card.

They need espeak-ng, which only makes data: `pip install espeakng-loader`. Each command goes on
where it was stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from mmaccel.demo.voices.words import CODEC_SEED, TRAIN_SEED, VALIDATION_SEED
from scripts.training.feature_fit import FeatureFit
from scripts.training.generator import GeneratorTraining, Task, train_generator
from scripts.training.optim import choose_device
from scripts.training.voices import Voices
from scripts.training.voices_codec import encode_pool, train_codec
from scripts.training.voices_data import make_pool
from scripts.training.voices_depth import VoicesDepth
from scripts.training.voices_export import export_voices, export_voices_card
from scripts.training.voices_features import export_speech_features_card, train_speech_features
from scripts.training.voices_judge import train_judge

WEIGHTS = Path(__file__).resolve().parents[2] / "mmaccel" / "demo" / "weights"
FEATURES = ("voices-features", "voices-features-card")
PARTS = (
    "voices-codec",
    "voices-data",
    "voices-judge",
    "voices",
    "voices-depth",
    "voices-export",
    "voices-card",
    *FEATURES,
)
_FEATURE_BATCH = 16
_CODEC_UTTERANCES = 1500
_HELD_OUT = 1000


def main(part: str, arguments: Sequence[str]) -> None:
    """Reads the options of one of `PARTS` and runs it."""
    parser = argparse.ArgumentParser(prog=f"python -m scripts.training {part}", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/voices"), help="folder of the run")
    folder = FEATURES[0] if part in FEATURES else "voices"
    parser.add_argument(
        "--target", type=Path, default=WEIGHTS / folder, help="folder of the shipped weights"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--codec-steps", type=int, default=4000)
    parser.add_argument("--utterances", type=int, default=32000, help="of the pool to learn from")
    parser.add_argument("--judge-steps", type=int, default=1600)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--fall", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=32, help="utterances a step")
    parser.add_argument("--start", help="folder of a trained model to begin from")
    parser.add_argument("--begin", type=int, default=0, help="steps that --start was trained for")
    parser.add_argument("--feature-steps", type=int, default=1500)
    parser.add_argument("--sentences", type=int, default=100, help="fresh ones, for the card")
    parser.add_argument("--note", action="append", default=[], help="of the card, a sentence")
    args = parser.parse_args(arguments)
    device = choose_device(args.device)
    args.work.mkdir(parents=True, exist_ok=True)
    fit = FeatureFit(args.feature_steps, _FEATURE_BATCH)
    if part == "voices-codec":
        make_pool(args.work, "validation", VALIDATION_SEED, _HELD_OUT)
        make_pool(args.work, "codec", CODEC_SEED, _CODEC_UTTERANCES)
        train_codec(args.work, args.codec_steps, device=device)
    elif part == "voices-data":
        make_pool(args.work, "train", TRAIN_SEED, args.utterances)
        for name in ("train", "validation"):
            encode_pool(args.work, name, device)
    elif part == "voices-judge":
        train_judge(args.work, args.judge_steps, device=device)
    elif part == "voices-features":
        train_speech_features(args.target, args.work, fit)
    elif part == "voices-features-card":
        print(json.dumps(export_speech_features_card(args.work, args.target, fit), indent=2))
    elif part == "voices-export":
        export_voices(args.work, args.target)
    elif part == "voices-card":
        card = export_voices_card(args.work, args.target, args.sentences, args.note)
        print(json.dumps(card, indent=2))
    else:
        plan = GeneratorTraining(
            steps=args.steps,
            fall=args.fall,
            batch=args.batch,
            start=args.start,
            begin=args.begin,
            snapshots=(250, 500, 1000, 2000, 4000),
        )
        task: Task = Voices(args.work) if part == "voices" else VoicesDepth(args.work)
        folder = args.work / part
        folder.mkdir(exist_ok=True)
        train_generator(folder, task, plan, device)
