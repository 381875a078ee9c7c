"""How results are written: JSON with a line for each fact, and for each row."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from mmaccel.outputs.machine import describe_machine
from mmaccel.outputs.whole_files import write_whole

Report = dict[str, Any]


def read_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Arguments of a script here: with threads, which are set, and a file for what is measured.
    Gradients are off from here on.
    """
    import torch

    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the report here")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.set_grad_enabled(False)
    return given


def write_measured(file: Path | None, **facts: Any) -> None:
    """Write what a script here has measured on a CPU, with its command and the machine, where a
    file is given.
    """
    if file is not None:
        module = f"benchmarks.{Path(sys.argv[0]).stem}"
        command = shlex.join(["python", "-m", module, *sys.argv[1:]])
        write_report(file, {"command": command, "machine": describe_machine("cpu"), **facts})


def write_report(file: Path, report: Report) -> None:
    lines = []
    for key, value in report.items():
        text = json.dumps(value, ensure_ascii=False)
        if value and isinstance(value, list) and isinstance(value[0], dict):
            rows = (json.dumps(row, ensure_ascii=False) for row in value)
            text = "[\n  " + ",\n  ".join(rows) + "\n ]"
        elif isinstance(value, dict) and key in (
            "parts",
            "runs",
        ):  # of the check on a GPU, and reference runs, by name
            named = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in value.items())
            text = "{\n  " + ",\n  ".join(named) + "\n }"
        lines.append(f" {json.dumps(key)}: {text}")
    file.parent.mkdir(parents=True, exist_ok=True)
    whole = "{\n" + ",\n".join(lines) + "\n}\n"
    write_whole(file, lambda path: path.write_text(whole, encoding="utf-8"))
