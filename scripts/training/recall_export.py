"""Writes the folder of `recall`: float16 weights, tokenizer, measured figures, the card."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.demo.loading import load_demo
from mmaccel.demo.recall.documents import EVALUATION_SEED, Question, list_questions
from mmaccel.demo.recall.words import ANSWERED, TASKS, WORDS, make_tokenizer
from scripts.training.cards import write_recall_card
from scripts.training.export import (
    GENERATOR_FILES,
    check_trained,
    copy_files,
    this_machine,
    write_folder,
)
from scripts.training.recall import LENGTHS, PLANS, STAGES
from scripts.training.vqa_answers import interval

LENGTHS_MEASURED = (256, 1024, 2048, 4096)


def export_recall(work: str | Path, target: str | Path) -> None:
    """Copies the averaged weights of the last stage that has begun from `work` to `target`.

    Args:
        work: of `train_recall`.
        target: made where missing.

    Raises:
        OptionError: no stage has been trained in `work`.
    """
    work, target = Path(work), Path(target)
    begun = [stage for stage in STAGES if (work / stage / "generator").is_dir()] or [STAGES[0]]
    source = work / begun[-1] / "generator"
    check_trained(source)
    target.mkdir(parents=True, exist_ok=True)
    copy_files(source, target, GENERATOR_FILES)
    make_tokenizer().save_pretrained(target)
    words = {"words": list(WORDS), "questions": list(ANSWERED)}
    (target / "words.json").write_text(json.dumps(words, indent=2) + "\n", encoding="utf-8")


def export_recall_card(
    work: str | Path, target: str | Path, per_task: int = 200, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """Measures the exported folder on the CPU and writes `card.json` and `README.md` there.

    Args:
        work: holds the logs.
        target: of `export_recall`.
        per_task: fresh questions of each task, at each length.
        notes: sentences about this training that its logs do not say.

    Returns:
        The content of `card.json`.
    """
    work, target = Path(work), Path(target)
    model, _ = load_demo("recall", target)
    cost = {stage: _cost(work / stage) for stage in STAGES if (work / stage).is_dir()}
    options = [
        f"--{stage}-{name} {made[name]}"
        for stage, made in cost.items()
        for name in ("steps", "fall", "batch")
        if made[name] != getattr(PLANS[stage], name)
    ]
    parts = (" ".join(["recall", *options]), "recall-export", "recall-card")
    card: dict[str, Any] = {
        "name": "recall",
        "command": "\n".join(f"python -m scripts.training {p} --work runs/recall" for p in parts),
        "parameters": sum(p.numel() for p in model.parameters()),
        "sizes": {
            "depth": model.config.num_hidden_layers,
            "heads": model.config.num_attention_heads,
            "key_heads": model.config.num_key_value_heads,
            "width": model.config.head_dim,
        },
        "right": {
            str(length): measure_answers(model, per_task, length) for length in LENGTHS_MEASURED
        },
        "training": cost,
        "notes": list(notes),
        "measured_with": this_machine("cpu"),
    }
    write_folder(target, card, write_recall_card(card))
    return card


@torch.no_grad()
def measure_answers(
    model: Any, per_task: int, length: int, seed: int = EVALUATION_SEED
) -> dict[str, dict[str, float]]:
    """Shares of right answers, of each task and of all, with 95 % intervals.

    An answer is right if the model, given the answer up to there, finds each of its ids the
    likeliest: this is so if and only if greedy decoding writes it.

    Args:
        model: of `mmaccel.load_demo("recall")`.
        per_task: questions of each task.
        length: tokens of a document.
        seed: of the documents.

    Returns:
        By task, and under `all` of those in `ANSWERED`: `right`, `low`, `high` in 0..1, and
        `questions`.
    """
    right: dict[str, list[bool]] = defaultdict(list)
    for document, question in list_questions(per_task, length, seed, TASKS):
        ids = torch.tensor([[*document.tokens, *question.prompt, *question.answer]])
        logits = model(ids[:, :-1], logits_to_keep=len(question.answer)).logits
        found = _is_right(logits[0], question)
        right[question.task].append(found)
        if question.task in ANSWERED:
            right["all"].append(found)
    shares = {}
    for task in (*TASKS, "all"):
        low, high = interval(sum(right[task]), len(right[task]))
        share = sum(right[task]) / len(right[task])
        figures = {"right": share, "low": low, "high": high}
        shares[task] = {name: round(value, 4) for name, value in figures.items()}
        shares[task]["questions"] = len(right[task])
    return shares


def _is_right(logits: Tensor, question: Question) -> bool:
    """Whether the likeliest ids of `[L, V]` are those of the answer."""
    return tuple(logits.argmax(-1).tolist()) == question.answer


def _cost(folder: Path) -> dict[str, Any]:
    log = (folder / "generator.jsonl").read_text(encoding="utf-8").splitlines()
    everything = [json.loads(line) for line in log]
    lines = [line for line in everything if "loss" in line]
    plan = [line["plan"] for line in everything if "plan" in line][-1]
    checked = [line for line in lines if "validation" in line]
    dropped = ("share", "pictures", "distinct")
    return {
        "steps": plan["steps"],
        "done": min(lines[-1]["step"], plan["steps"]),  # fewer where a run went back
        "fall": plan["fall"],
        "batch": plan["batch"],
        "lengths": sorted(set(LENGTHS[folder.name])),
        "minutes": round(lines[-1]["seconds"] / 60, 1),
        "validation": checked[-1]["validation"] if checked else None,
        "curve": [{k: v for k, v in line.items() if k not in dropped} for line in checked],
    }
