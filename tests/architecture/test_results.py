"""Every figure of `benchmarks/results` names the command that makes it, which is still there."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from mmaccel.cli import app
from tests.architecture.source import ROOT

RESULTS = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))
MEASURED = [file for file in RESULTS if file.stem not in ("gpu-nvidia-h200", "reference_runs")]


@pytest.mark.parametrize("file", MEASURED, ids=lambda file: file.stem)
def test_a_result_names_a_command_that_is_there(file: Path) -> None:
    program, *words = shlex.split(json.loads(file.read_text(encoding="utf-8"))["command"])
    assert program in ("mmaccel", "python")
    if program == "python":
        script = words[1].replace(".", "/") + ".py" if words[0] == "-m" else words[0]
        assert (ROOT / script).is_file()
        return
    command = get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= known
