"""The commands of `moving-scenes`: train (a stopped run goes on), export and measure it, and the
same of the features of its clips."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from mmaccel.demo.moving_scenes.layout import N_FRAMES
from scripts.training.feature_fit import FeatureFit
from scripts.training.generator import GeneratorTraining, train_generator
from scripts.training.moving_scenes import MovingScenes, train_frame_tokenizer
from scripts.training.moving_scenes_export import (
    export_moving_scenes,
    export_moving_scenes_card,
)
from scripts.training.moving_scenes_features import (
    export_clip_features_card,
    train_clip_features,
)
from scripts.training.optim import choose_device

WEIGHTS = Path(__file__).resolve().parents[2] / "mmaccel" / "demo" / "weights"
FEATURES = ("moving-scenes-features", "moving-scenes-features-card")
PARTS = ("moving-scenes", "moving-scenes-export", "moving-scenes-card", *FEATURES)
_FEATURE_BATCH = 32


def main(part: str, arguments: Sequence[str]) -> None:
    """Reads the options of one of `PARTS` and runs it."""
    parser = argparse.ArgumentParser(prog=f"python -m scripts.training {part}", description=__doc__)
    parser.add_argument(
        "--work", type=Path, default=Path("runs/moving-scenes"), help="folder of the run"
    )
    folder = FEATURES[0] if part in FEATURES else "moving-scenes"
    parser.add_argument(
        "--target", type=Path, default=WEIGHTS / folder, help="folder of the shipped weights"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--tokenizer-steps", type=int, default=1500)
    parser.add_argument("--tokenizer-clips", type=int, default=2400)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--fall", type=int, default=2500)
    parser.add_argument("--batch", type=int, default=12, help="clips a step")
    parser.add_argument("--frames", type=int, default=N_FRAMES, help="of a clip, in this stage")
    parser.add_argument("--compile", action="store_true", help="compile (needs a C compiler)")
    parser.add_argument("--workers", type=int, default=0, help="processes that make batches")
    parser.add_argument("--start", help="folder of a trained model to begin from")
    parser.add_argument("--begin", type=int, default=0, help="steps that --start was trained for")
    parser.add_argument("--float32", action="store_true", help="no bfloat16, even where it is fast")
    parser.add_argument("--feature-steps", type=int, default=3200)
    parser.add_argument("--captions", type=int, default=100, help="fresh captions, for the card")
    parser.add_argument("--note", action="append", default=[], help="of the card, a sentence")
    args = parser.parse_args(arguments)
    fit = FeatureFit(args.feature_steps, _FEATURE_BATCH)
    if part == "moving-scenes-features":
        train_clip_features(args.target, args.work, fit)
        return
    if part == "moving-scenes-features-card":
        print(json.dumps(export_clip_features_card(args.work, args.target, fit), indent=2))
        return
    if part == "moving-scenes-export":
        export_moving_scenes(args.work, args.target)
        return
    if part == "moving-scenes-card":
        card = export_moving_scenes_card(args.work, args.target, args.captions, args.note)
        print(json.dumps(card, indent=2))
        return
    device = choose_device(args.device)
    train_frame_tokenizer(args.work, args.tokenizer_steps, args.tokenizer_clips, device)
    plan = GeneratorTraining(
        steps=args.steps,
        fall=args.fall,
        batch=args.batch,
        snapshots=(250, 1000, 2500, 5000),
        compiled=args.compile,
        mixed=not args.float32,
        workers=args.workers,
        start=args.start,
        begin=args.begin,
    )
    task = MovingScenes(args.work, args.frames, one_shape=args.compile, device=device)
    train_generator(args.work, task, plan, device)
