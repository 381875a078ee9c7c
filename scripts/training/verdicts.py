"""Measures a model of captioned scenes by the checker, and writes the figures into its card.

    python -m scripts.training.verdicts mmaccel/demo/weights/scenes-var --guidance 1,2,4

The checker and the shares are those of `mmaccel evaluate pictures`; captions are fresh ones, number
k of them with seed k. What a caption of the training says word by word counts as seen.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel import TextToImage
from mmaccel.catalog import default_policy, read_policy
from mmaccel.demo.scenes.checker import check_images
from mmaccel.demo.scenes.data import (
    EVALUATION_SEED,
    TRAIN_SEED,
    VALIDATION_SEED,
    make_captions,
    make_scenes,
)
from mmaccel.evaluation.quality.report import Verdict, sum_verdicts, verdict_of
from scripts.training.card import write_card
from scripts.training.scenes import psnr

_HELD_OUT = 2000  # images of the validation
_PART = 50


def judge(images: Tensor, captions: Sequence[str]) -> list[Verdict]:
    """Verdicts of images [B, 3, 64, 64] in 0..1."""
    return [verdict_of(each) for each in check_images(images, captions)]


def share(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Shares of right verdicts, and halves of their intervals."""
    summed = sum_verdicts(verdicts) or {"shares": {}, "intervals": {}}
    halves = {name: (high - low) / 2 for name, (low, high) in summed["intervals"].items()}
    return {"scores": _round(summed["shares"]), "half_widths": _round(halves)}


def measure_tokenizer(tokenizer: Any, count: int, held_out: int = _HELD_OUT) -> dict[str, Any]:
    _, _, unseen = make_scenes(VALIDATION_SEED, range(held_out))
    codes = [tokenizer.encode(part.float() / 255) for part in unseen.split(_PART)]
    _, captions, drawn = make_scenes(EVALUATION_SEED, range(count))
    images = drawn.float() / 255
    again = torch.cat([tokenizer.decode(tokenizer.encode(part)) for part in images.split(_PART)])
    return {
        "psnr_db": round(psnr(tokenizer, unseen), 2),
        "psnr_pictures": held_out,
        "vocab_size": tokenizer.vocab_size,
        "codes_used": int(torch.cat(codes).unique().numel()),
        "checker_pictures": count,
        "checker_on_pictures": share(judge(images, captions))["scores"],
        "checker_on_reconstructions": share(judge(again, captions))["scores"],
    }


def measure_samples(
    pipe: TextToImage, policy: Any, guidance: float, count: int, seen: Collection[str]
) -> dict[str, Any]:
    captions = make_captions(EVALUATION_SEED, range(count))
    made = pipe(
        captions,
        policy=policy,
        guidance_scale=guidance,
        temperature=1.0,
        seed=[*range(count)],
        batch_size=_PART,
        output_type="pt",
    )
    verdicts = judge(made.images, captions)
    new = [verdict for verdict, text in zip(verdicts, captions, strict=True) if text not in seen]
    return {
        "policy": made.stats.policy,
        "exactness": made.stats.exactness,
        "passes": round(made.stats.row_passes / count, 1),
        "captions": count,
        "guidance_scale": guidance,
        "temperature": 1.0,
        **share(verdicts),
        "unseen": {"captions": len(new), **share(new)["scores"]},
        "tokens_per_pass": round(made.stats.tokens_per_pass, 3),
        "seconds": round(made.stats.seconds, 1),
    }


def _round(shares: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in shares.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.training.verdicts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="of the weights, with a card.json")
    parser.add_argument("--policy", action="append", help="as jacobi:window=16; may be repeated")
    parser.add_argument("--guidance", default="1,2", help="scales, with commas")
    parser.add_argument("--count", type=int, default=500, help="captions")
    parser.add_argument("--held-out", type=int, default=_HELD_OUT, help="images for the tokenizer")
    args = parser.parse_args(arguments)
    file = args.folder / "card.json"
    card = json.loads(file.read_text(encoding="utf-8"))
    pipe = TextToImage.from_pretrained(args.folder, dtype="float32")
    tokenizer: Any = pipe.image_model.tokenizer  # type: ignore[attr-defined]
    last = list(card["stages"].values())[-1]
    n_trained = last["step"] * last["batch"]
    seen = set(make_captions(TRAIN_SEED, range(n_trained)))
    card["tokenizer"] = measure_tokenizer(tokenizer, args.count, args.held_out)
    card["tokenizer_parameters"] = sum(each.numel() for each in tokenizer.parameters())
    card["samples"] = [
        measure_samples(pipe, read_policy(name), float(scale), args.count, seen)
        for name in args.policy or [default_policy(pipe.model)]
        for scale in args.guidance.split(",")
    ]
    file.write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    (args.folder / "README.md").write_text(write_card(card), encoding="utf-8")


if __name__ == "__main__":
    main()
