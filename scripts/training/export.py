"""Writes the folders of shipped weights: float16 weights, words, measured figures, the card.

`card.json` holds the figures, `README.md` is written from it, see `scripts.training.cards`.
"""

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
from mmaccel.demo.grammar.tasks import ASK, BOS, CANVAS, END, MASK, PAD, TASKS, WORDS
from mmaccel.demo.scenes.data import CaptionWords
from mmaccel.demo.scenes.features import load_features
from mmaccel.errors import OptionError
from mmaccel.samplers.window.autoregressive import Autoregressive
from mmaccel.samplers.window.jacobi import Jacobi
from mmaccel.samplers.window.speculative_jacobi import SpeculativeJacobi
from mmaccel.tokenizers_vq.autoencoder import load_tokenizer
from scripts.training.cards import (
    write_features_card,
    write_grammar_card,
    write_masked_card,
    write_scenes_card,
)
from scripts.training.generator import load_generator
from scripts.training.grammar_masked import (
    DECODED,
    measure_answers,
    measure_bound,
    measure_distributions,
)
from scripts.training.scenes import (
    measure_acceptance,
    measure_loss,
    measure_samples,
    measure_tokenizer,
)
from scripts.training.scenes_features import measure_accuracy, measure_distances
from scripts.training.scenes_masked import measure_masked_loss, measure_masked_samples

SCENES_POLICIES: tuple[tuple[Policy, float], ...] = (
    (Autoregressive(), 1.0),
    (Autoregressive(), 2.0),
    (Jacobi(window=16), 2.0),
    (SpeculativeJacobi(window=16), 2.0),
)
MASKED_ORDERS = (("random", 4), ("random", 16), ("confidence", 4))
_DISTRIBUTION_PROMPTS = 20
GENERATOR_FILES = ("config.json", "generation_config.json", "model.safetensors")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.safetensors")


def export_scenes(work: str | Path, target: str | Path) -> None:
    """Copies tokenizer and averaged generator from `work` to `target`; writes `words.json`.

    Args:
        work: of `train_tokenizer` and `train_generator`.
        target: made where missing.

    Raises:
        OptionError: nothing has been trained in `work`.
    """
    work, target = Path(work), Path(target)
    check_trained(work / "generator")
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


def export_scenes_card(
    work: str | Path, target: str | Path, count: int = 500, device: str = "cpu"
) -> dict[str, Any]:
    """Measures the exported folder and writes `card.json` and `README.md` there.

    Args:
        work: holds logs, snapshots and the pool `validation`.
        target: of `export_scenes`.
        count: fresh captions for the checker.
        device: where to sample.

    Returns:
        The content of `card.json`.
    """
    work, target = Path(work), Path(target)
    tokenizer, model = load_tokenizer(target), load_generator(target, device)
    cost = training_cost(work)
    seen = set(json.loads((work / "train.captions.json").read_text(encoding="utf-8")))
    samples = [
        measure_samples(model, tokenizer, policy, count=count, guidance_scale=scale, seen=seen)
        for policy, scale in SCENES_POLICIES
    ]
    card: dict[str, Any] = {
        "name": "scenes",
        "command": scenes_commands(work),
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokenizer_parameters": sum(p.numel() for p in tokenizer.parameters()),
        "tokenizer": measure_tokenizer(tokenizer, work),
        "generator": measure_loss(model, work, device=device),
        "samples": samples,
        "training": cost,
        "acceptance": measure_acceptance(work, cost["generator_steps"], tokenizer),
        "measured_with": this_machine(device),
    }
    write_folder(target, card, write_scenes_card(card))
    return card


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
        "command": masked_commands(work, "masked"),
        "parameters": sum(p.numel() for p in model.parameters()),
        "mask_token_id": model.config.mask_token_id,
        "logit_shift": model.config.logit_shift,
        "power": last_task(work)["power"],
        "samples": [
            measure_masked_samples(model, tokenizer, count=count, order=order, per_step=n)
            for order, n in MASKED_ORDERS
        ],
        "generator": measure_masked_loss(model.to(device), work, device),
        "training": generator_cost(work),
        "measured_with": this_machine(device),
    }
    write_folder(target, card, write_masked_card(card))
    return card


def export_grammar(work: str | Path, target: str | Path) -> None:
    """Copies the averaged model from `work` to `target`; writes `words.json`.

    Args:
        work: of `train_generator` with `Grammar`.
        target: made where missing.

    Raises:
        OptionError: nothing has been trained in `work`.
    """
    source, target = Path(work) / "generator", Path(target)
    check_trained(source)
    target.mkdir(parents=True, exist_ok=True)
    copy_files(source, target, GENERATOR_FILES)
    text = {
        "words": list(WORDS),
        "tasks": list(TASKS),
        "canvas": CANVAS,
        "pad": PAD,
        "bos": BOS,
        "ask": ASK,
        "end": END,
        "mask": MASK,
        "logit_shift": 0,
    }
    (target / "words.json").write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")


def export_grammar_card(
    work: str | Path, target: str | Path, count: int = 200, device: str = "cpu"
) -> dict[str, Any]:
    """Measures the exported folder and writes `card.json` and `README.md` there.

    Args:
        work: holds the log.
        target: of `export_grammar`.
        count: fresh prompts of each task.
        device: where to measure the loss; answers are drawn on the CPU.

    Returns:
        The content of `card.json`.
    """
    work, target = Path(work), Path(target)
    model = load_generator(target)
    card: dict[str, Any] = {
        "name": "grammar-masked",
        "command": masked_commands(work, "grammar"),
        "parameters": sum(p.numel() for p in model.parameters()),
        "prompts_per_task": count,
        "answers": [measure_answers(model, order, n, count) for order, n in DECODED],
        "laws_prompts": _DISTRIBUTION_PROMPTS,
        "laws": [
            {"order": order, **measure_distributions(model, _DISTRIBUTION_PROMPTS, order)}
            for order in ("confidence", "left")
        ],
        "generator": measure_bound(model.to(device), device),
        "training": generator_cost(work),
        "measured_with": this_machine(device),
    }
    write_folder(target, card, write_grammar_card(card))
    return card


def export_features_card(work: str | Path, target: str | Path, count: int = 1000) -> dict[str, Any]:
    """Measures the exported network and writes `card.json` and `README.md` next to it.

    Args:
        work: of `train_features`; holds its log.
        target: holds the weights.
        count: images for each figure.

    Returns:
        The content of `card.json`.
    """
    work, target = Path(work), Path(target)
    last = _lines(work / "features.jsonl")[-1]
    card: dict[str, Any] = {
        "name": "scenes-features",
        "command": _commands("features", "features-card"),
        "parameters": sum(p.numel() for p in load_features(target).parameters()),
        "pictures": count,
        "right": measure_accuracy(count),
        "distances": measure_distances(count),
        "training": {
            "pictures": last["pictures"],
            "epochs": last["epoch"],
            "minutes": round(last["seconds"] / 60, 1),
        },
        "measured_with": this_machine("cpu"),
    }
    write_folder(target, card, write_features_card(card))
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


def copy_files(folder: Path, target: Path, names: Iterable[str]) -> None:
    """Copies those files that exist, each complete or not at all."""
    for name in names:
        if (folder / name).is_file():
            partial = target / f"{name}.partial"
            shutil.copyfile(folder / name, partial)
            partial.replace(target / name)


def write_folder(target: Path, card: dict[str, Any], text: str) -> None:
    """Writes `card.json` and `README.md`."""
    (target / "card.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    (target / "README.md").write_text(text, encoding="utf-8")


def training_cost(work: str | Path) -> dict[str, Any]:
    """Steps, images, minutes and validation losses along the way, from a work folder's logs."""
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


def last_task(work: Path) -> dict[str, Any]:
    """What the log says of the task, the last time a run began."""
    task: dict[str, Any] = [r["task"] for r in _lines(work / "generator.jsonl") if "task" in r][-1]
    return task


def scenes_commands(work: str | Path) -> str:
    """The commands that made a work folder, one a line; from its logs."""
    return _commands("tokenizer", "data", *plan_commands(work, "generator"), "export", "card")


def masked_commands(work: Path, part: str) -> str:
    """The commands that made a masked model's folder, one a line; from its logs."""
    return _commands(*plan_commands(work, part), f"{part}-export", f"{part}-card")


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


def this_machine(device: str) -> dict[str, Any]:
    """Where a card's figures were measured."""
    return {
        "device": device,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }


def _commands(*parts: str) -> str:
    return "\n".join(f"python scripts/train_demo.py {part}" for part in parts)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
