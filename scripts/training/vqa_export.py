"""Writes the folder of `scenes-vqa`: float16 weights, processor, measured figures, the card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmaccel.demo.loading import load_demo
from scripts.training.cards import write_vqa_card
from scripts.training.export import (
    GENERATOR_FILES,
    check_trained,
    copy_files,
    this_machine,
    write_folder,
)
from scripts.training.vqa import N_VISUAL, PLANS, STAGES
from scripts.training.vqa_answers import measure_answers, measure_guesses


def export_vqa(work: str | Path, target: str | Path) -> None:
    """Copies the averaged weights of the last stage that has begun from `work` to `target`.

    Args:
        work: of `train_vqa`.
        target: made where missing.

    Raises:
        OptionError: no language model has been trained in `work`.
    """
    work, target = Path(work), Path(target)
    full = work / "full" / "generator"
    source = full if (full / "model.safetensors").is_file() else work / "language" / "generator"
    check_trained(source)
    target.mkdir(parents=True, exist_ok=True)
    copy_files(source, target, GENERATOR_FILES)


def export_vqa_card(
    work: str | Path, target: str | Path, per_kind: int = 500, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """Measures the exported folder on the CPU and writes `card.json` and `README.md` there.

    Args:
        work: holds the logs.
        target: of `export_vqa`.
        per_kind: fresh questions of each kind.
        notes: sentences about this training that its logs do not say.

    Returns:
        The content of `card.json`.
    """
    work, target = Path(work), Path(target)
    model, processor = load_demo("scenes-vqa", target)
    cost = {stage: _cost(work / stage) for stage in STAGES if (work / stage).is_dir()}
    steps = [f"--{s}-steps {c['steps']}" for s, c in cost.items() if c["steps"] != PLANS[s].steps]
    steps.append("--compile")
    steps += [f"--batch {c['batch']}" for c in list(cost.values())[-1:] if c["batch"] != 8]
    parts = (" ".join(["vqa", *steps]), "vqa-export", "vqa-card")
    card: dict[str, Any] = {
        "name": "scenes-vqa",
        "command": "\n".join(f"python -m scripts.training {p} --work runs/vqa" for p in parts),
        "parameters": sum(p.numel() for p in model.parameters()),
        "tower_parameters": sum(p.numel() for p in model.model.vision_tower.parameters()),
        "visual_tokens": N_VISUAL,
        "right": measure_answers(model, processor, per_kind),
        "unseen": measure_guesses(),
        "training": cost,
        "notes": list(notes),
        "measured_with": this_machine("cpu"),
    }
    write_folder(target, card, write_vqa_card(card))
    return card


def _cost(folder: Path) -> dict[str, Any]:
    log = (folder / "generator.jsonl").read_text(encoding="utf-8").splitlines()
    everything = list(map(json.loads, log))
    lines = [line for line in everything if "loss" in line]
    checked = [line for line in lines if "validation" in line]
    return {
        "steps": lines[-1]["step"],
        "batch": [line["plan"]["batch"] for line in everything if "plan" in line][-1],
        "images": lines[-1]["pictures"],
        "minutes": round(lines[-1]["seconds"] / 60, 1),
        "validation": checked[-1]["validation"] if checked else None,
        "curve": [{k: v for k, v in line.items() if k != "share"} for line in checked],
    }
