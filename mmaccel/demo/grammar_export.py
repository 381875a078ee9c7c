"""Writes the shipped folder of `grammar-masked`: float16 weights, words, `card.json`, the card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmaccel.demo.grammar_card import write_grammar_card
from mmaccel.demo.grammar_measure import DECODED, measure_answers, measure_bound, measure_laws
from mmaccel.demo.grammar_words import ASK, BOS, CANVAS, END, MASK, PAD, TASKS, WORDS
from mmaccel.demo.masked_export import check_trained, commands, write_folder
from mmaccel.demo.scenes_export import GENERATOR_FILES, copy_files, generator_cost, this_machine
from mmaccel.demo.scenes_measure import load_generator

_LAW_PROMPTS = 20


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
        "command": commands(work, "grammar"),
        "parameters": sum(p.numel() for p in model.parameters()),
        "prompts_per_task": count,
        "answers": [measure_answers(model, order, n, count) for order, n in DECODED],
        "laws_prompts": _LAW_PROMPTS,
        "laws": [
            {"order": order, **measure_laws(model, _LAW_PROMPTS, order)}
            for order in ("confidence", "left")
        ],
        "generator": measure_bound(model.to(device), device),
        "training": generator_cost(work),
        "measured_with": this_machine(device),
    }
    write_folder(target, card, write_grammar_card(card))
    return card
