"""Writes the shipped folder of `scenes`: float16 weights, configurations, `card.json`, the card."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from mmaccel.contracts import Policy
from mmaccel.demo.scenes_acceptance import measure_acceptance
from mmaccel.demo.scenes_card import write_card
from mmaccel.demo.scenes_measure import (
    load_generator,
    measure_loss,
    measure_samples,
    measure_tokenizer,
)
from mmaccel.demo.scenes_words import CaptionWords
from mmaccel.errors import OptionError
from mmaccel.samplers.autoregressive import Autoregressive
from mmaccel.samplers.jacobi import Jacobi
from mmaccel.samplers.speculative_jacobi import SpeculativeJacobi
from mmaccel.tokenizers_vq.load import load_tokenizer

MEASURED: tuple[tuple[Policy, float], ...] = (
    (Autoregressive(), 1.0),
    (Autoregressive(), 2.0),
    (Jacobi(window=16), 2.0),
    (SpeculativeJacobi(window=16), 2.0),
)
GENERATOR_FILES = ("config.json", "generation_config.json", "model.safetensors")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.safetensors")


def export_weights(work: str | Path, target: str | Path) -> None:
    """Copies tokenizer and averaged generator from `work` to `target`; writes `words.json`.

    Args:
        work: of `train_tokenizer` and `train_generator`.
        target: made where missing.

    Raises:
        OptionError: nothing has been trained in `work`.
    """
    work, target = Path(work), Path(target)
    if not (work / "generator" / "model.safetensors").is_file():
        raise OptionError(
            f"work: expected a trained generator in {work}, found none. Train it first."
        )
    target.mkdir(parents=True, exist_ok=True)
    copy_files(work / "tokenizer", target, TOKENIZER_FILES)
    copy_files(work / "generator", target, GENERATOR_FILES)
    words = CaptionWords(load_tokenizer(target).vocab_size)
    text = {
        "words": list(words.words),
        "max_words": words.max_words,
        "n_image_tokens": words.n_image_tokens,
        "bos": words.bos,
        "boi": words.boi,
        "pad": words.pad,
        "first_word": words.pad + 1,
        "grid": [16, 16],
    }
    (target / "words.json").write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")


def copy_files(folder: Path, target: Path, names: Iterable[str]) -> None:
    """Copies those files that exist, each complete or not at all."""
    for name in names:
        if (folder / name).is_file():
            partial = target / f"{name}.partial"
            shutil.copyfile(folder / name, partial)
            partial.replace(target / name)


def this_machine(device: str) -> dict[str, Any]:
    """Where a card's figures were measured."""
    return {
        "device": device,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }


def export_card(
    work: str | Path, target: str | Path, count: int = 500, device: str = "cpu"
) -> dict[str, Any]:
    """Measures the exported folder and writes `card.json` and `README.md` there.

    Args:
        work: holds logs, snapshots and the pool `validation`.
        target: of `export_weights`.
        count: fresh captions for the checker.
        device: where to sample.

    Returns:
        The content of `card.json`.
    """
    work, target = Path(work), Path(target)
    tokenizer, model = load_tokenizer(target), load_generator(target, device)
    card_file = target / "card.json"
    cost = training_cost(work)
    seen = set(json.loads((work / "train.captions.json").read_text(encoding="utf-8")))
    samples = [
        measure_samples(model, tokenizer, policy, count=count, guidance_scale=scale, seen=seen)
        for policy, scale in MEASURED
    ]
    card: dict[str, Any] = {
        "name": "scenes",
        "command": training_commands(work),
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokenizer_parameters": sum(p.numel() for p in tokenizer.parameters()),
        "tokenizer": measure_tokenizer(tokenizer, work),
        "generator": measure_loss(model, work, device=device),
        "samples": samples,
        "training": cost,
        "acceptance": measure_acceptance(work, cost["generator_steps"], tokenizer),
        "measured_with": this_machine(device),
    }
    card_file.write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    (target / "README.md").write_text(write_card(card), encoding="utf-8")
    return card


def training_cost(work: str | Path) -> dict[str, Any]:
    """Steps, pictures, minutes and validation losses along the way, from a work folder's logs."""
    tokenizer = _lines(Path(work) / "tokenizer.jsonl")
    return {
        "tokenizer_steps": tokenizer[-1]["step"],
        "tokenizer_minutes": round(tokenizer[-1]["seconds"] / 60, 1),
        **generator_cost(work),
    }


def generator_cost(work: str | Path) -> dict[str, Any]:
    """The generator's part of `training_cost`."""
    generator = [line for line in _lines(Path(work) / "generator.jsonl") if "loss" in line]
    last = generator[-1]
    return {
        "generator_steps": last["step"],
        "generator_minutes": round(last["seconds"] / 60, 1),
        "generator_pictures": last["pictures"],
        "distinct_pictures": last["distinct"],
        "validation_nats_by_step": {
            str(r["step"]): r["validation"] for r in generator if "validation" in r
        },
    }


def training_commands(work: str | Path) -> str:
    """The commands that made a work folder, one a line; from its logs."""
    parts = ["tokenizer", "data", *plan_commands(work, "generator"), "export", "card"]
    return "\n".join(f"python scripts/train_demo.py {part}" for part in parts)


def plan_commands(work: str | Path, part: str) -> list[str]:
    """What followed the script's name each time a run of `train_generator` began."""
    commands = []
    for line in _lines(Path(work) / "generator.jsonl"):
        if "plan" in line:
            plan = line["plan"]
            options = [f"--{name} {plan[name]}" for name in ("steps", "fall", "batch")]
            options += ["--compile"] * plan["compiled"]
            options += [f"--start {plan['start']}"] * bool(plan["start"])
            options += [f"--begin {plan['begin']}"] * bool(plan.get("begin"))
            options += [f"--emphasis {plan['emphasis']}"] * (plan["emphasis"] != 1)
            options += [f"--{name} {value:g}" for name, value in line.get("task", {}).items()]
            is_going_on = line["step"] > plan.get("begin", 0)
            options += [f" # from step {line['step']}"] * is_going_on
            commands.append(" ".join([part, *options]))
    return commands


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
