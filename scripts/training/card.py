"""Writes the folder of a model, and the card beside its weights: `README.md`, from `card.json` and
the model's own page in `cards/`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from mmaccel.errors import OptionError
from scripts.training.loop import read_log
from scripts.training.models import Model

CARDS = Path(__file__).parent / "cards"


def export(name: str, model: Model, work: Path, target: Path, command: str) -> None:
    """Copies the weights from `work` to `target`, made where missing, and writes the card."""
    parts = model.parts or {list(model.plans)[-1]: ""}
    n_weights = {}
    for stage, where in parts.items():
        folder = work / stage / "weights"
        if not folder.is_dir():
            raise OptionError(f"work: expected a trained {stage} in {work}, found none; train it")
        shutil.copytree(folder, target / where, dirs_exist_ok=True)
        n_weights[stage] = count_weights(folder)
    model.finish(work, target)
    card = {
        "name": name,
        "command": command,
        "commits": {_read_commit(): "the weights"},
        "parameters": n_weights[list(parts)[-1]],
        "stages": {stage: _sum_up(work / stage) for stage in model.plans},
        "measured_with": this_machine(),
    }
    (target / "card.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    (target / "README.md").write_text(write_card(card), encoding="utf-8")


def count_weights(folder: Path) -> int:
    """Numbers in a folder's weights."""
    count = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            count += sum(weights.get_tensor(key).numel() for key in weights.keys())
    return count


def _sum_up(work: Path) -> dict[str, Any]:
    log = read_log(work)
    plan = [line["plan"] for line in log if "plan" in line][-1]
    last = [line for line in log if "loss" in line][-1]
    return {"batch": plan["batch"], "minutes": last["seconds"] / 60, **last}


def _read_commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def this_machine(device: str = "cpu") -> dict[str, Any]:
    return {
        "device": device,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }


def write_card(card: dict[str, Any]) -> str:
    """The card of a model, Markdown.

    In its page, a line is a format of the figures in `card`. One that begins with `each KEY:` comes
    once for each of the entries under that key, whose name or number is `{key}` and whose value,
    where it is one figure, is `{value}`. Lines whose figures are missing are left out, and so are
    tables without a row and sections without a line.
    """
    page = (CARDS / f"{card['name']}.md").read_text(encoding="utf-8")
    page += (CARDS / "every.md").read_text(encoding="utf-8")
    text = "".join(f"{line}\n" for line in _fill(page, card))
    text = re.sub(r"\| .* \|\n\| ---.*\n(?!\|)", "", text)
    text = re.sub(r"## .*\n\n+(?=## |\Z)", "", text)
    return re.sub(r"\n{3,}", "\n\n", text)


def _fill(page: str, card: dict[str, Any]) -> Iterator[str]:
    for line in page.splitlines():
        each = re.fullmatch(r"each ([\w.]+): (.*)", line)
        rows: list[dict[str, Any]] = [card]
        if each:
            line = each[2]
            found: Any = card
            for key in each[1].split("."):
                found = found.get(key, {})
            pairs = found.items() if isinstance(found, dict) else enumerate(found)
            rows = [{"key": k, **(v if isinstance(v, dict) else {"value": v})} for k, v in pairs]
        for row in rows:
            try:
                yield line.format_map(row)
            except (KeyError, IndexError):
                continue
