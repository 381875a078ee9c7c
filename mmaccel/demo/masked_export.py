"""Writes the shipped folder of `scenes-masked`: float16 weights, words, `card.json`, the card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmaccel.demo.masked_card import write_masked_card
from mmaccel.demo.masked_measure import measure_masked_loss, measure_masked_samples
from mmaccel.demo.scenes_export import (
    GENERATOR_FILES,
    copy_files,
    generator_cost,
    plan_commands,
    this_machine,
)
from mmaccel.demo.scenes_measure import load_generator
from mmaccel.errors import OptionError
from mmaccel.tokenizers_vq.load import load_tokenizer

MEASURED = (("random", 4), ("random", 16), ("confidence", 4))


def export_masked(work: str | Path, target: str | Path, scenes: str | Path) -> None:
    """Copies the averaged masked generator from `work` to `target`; writes `words.json`.

    Args:
        work: of `train_generator` with `MaskedScenes`.
        target: made where missing.
        scenes: folder of the exported `scenes`, whose words these are.

    Raises:
        OptionError: nothing has been trained in `work`.
    """
    work, target = Path(work), Path(target)
    source = work / "generator"
    check_trained(source)
    target.mkdir(parents=True, exist_ok=True)
    copy_files(source, target, GENERATOR_FILES)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    words = json.loads((Path(scenes) / "words.json").read_text(encoding="utf-8"))
    words |= {"mask": config["mask_token_id"], "logit_shift": config["logit_shift"]}
    words["picture_tokenizer"] = "scenes"
    (target / "words.json").write_text(json.dumps(words, indent=2) + "\n", encoding="utf-8")


def export_masked_card(
    work: str | Path, target: str | Path, count: int = 100, device: str = "cpu"
) -> dict[str, Any]:
    """Measures the exported folder and writes `card.json` and `README.md` there.

    Args:
        work: holds logs, the pool `validation` and `tokenizer/`.
        target: of `export_masked`.
        count: fresh captions for the checker.
        device: where to measure the loss; samples are drawn on the CPU.

    Returns:
        The content of `card.json`.
    """
    work, target = Path(work), Path(target)
    tokenizer, model = load_tokenizer(work / "tokenizer"), load_generator(target)
    card: dict[str, Any] = {
        "name": "scenes-masked",
        "command": commands(work, "masked"),
        "parameters": sum(p.numel() for p in model.parameters()),
        "mask_token_id": model.config.mask_token_id,
        "logit_shift": model.config.logit_shift,
        "power": last_task(work)["power"],
        "samples": [
            measure_masked_samples(model, tokenizer, count=count, order=order, per_step=n)
            for order, n in MEASURED
        ],
        "generator": measure_masked_loss(model.to(device), work, device),
        "training": generator_cost(work),
        "measured_with": this_machine(device),
    }
    write_folder(target, card, write_masked_card(card))
    return card


def check_trained(source: Path) -> None:
    """Refuses a folder without weights.

    Raises:
        OptionError: there are none.
    """
    if not (source / "model.safetensors").is_file():
        raise OptionError(
            f"work: expected a trained generator in {source.parent}, found none. Train it first."
        )


def commands(work: Path, part: str) -> str:
    """The commands that made a masked model's folder, one a line; from its logs."""
    parts = [*plan_commands(work, part), f"{part}-export", f"{part}-card"]
    return "\n".join(f"python scripts/train_demo.py {part}" for part in parts)


def last_task(work: Path) -> dict[str, Any]:
    """What the log says of the task, the last time a run began."""
    lines = (work / "generator.jsonl").read_text(encoding="utf-8").splitlines()
    tasks: list[dict[str, Any]] = [r["task"] for r in map(json.loads, lines) if "task" in r]
    return tasks[-1]


def write_folder(target: Path, card: dict[str, Any], text: str) -> None:
    """Writes `card.json` and `README.md`."""
    (target / "card.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    (target / "README.md").write_text(text, encoding="utf-8")
