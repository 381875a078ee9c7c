"""`scripts/measure.py`: every result says how it was made, and can be made so again."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

SCRIPT = ROOT / "scripts" / "measure.py"


@pytest.fixture
def script() -> dict:
    return runpy.run_path(str(SCRIPT))


def test_every_result_can_be_made_again(script: dict) -> None:
    commands = script["recorded"](ROOT / "benchmarks" / "results")
    assert commands
    for file, command in commands.items():
        if command[0] == "python":
            module = command[1] == "-m"
            script = command[2].replace(".", "/") + ".py" if module else command[1]
            assert (ROOT / script).is_file(), file
        assert str(file.relative_to(ROOT)) in command, file


def test_commands_are_run_and_failures_are_reported(
    script: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "update_docs.py").write_text("print('tables')")
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    for name, code in (("fine", "print('made', flush=True)"), ("broken", "raise SystemExit(3)")):
        (tmp_path / f"{name}.py").write_text(code)
        report = {"command": f"python {name}.py", "records": {}, "rows": [{"a": 1}, {"a": 2}]}
        (results / f"{name}.json").write_text(json.dumps(report))
    monkeypatch.setitem(script["main"].__globals__, "ROOT", tmp_path)
    monkeypatch.setitem(script["main"].__globals__, "RESULTS", results)
    monkeypatch.setattr(sys, "argv", ["measure.py"])
    assert script["main"]() == 1
    said = capfd.readouterr()
    assert "made" in said.out and "tables" in said.out and "failed: broken" in said.err
    lines = (results / "fine.json").read_text().splitlines()
    assert lines[2:5] == [' "rows": [', '  {"a": 1},', '  {"a": 2}'] and "records" not in lines[2]
    monkeypatch.setattr(sys, "argv", ["measure.py", "fine"])
    assert script["main"]() == 0 and "failed" not in capfd.readouterr().err
    monkeypatch.setattr(sys, "argv", ["measure.py", "none"])
    with pytest.raises(SystemExit) as caught:
        script["main"]()
    assert caught.value.code == 2
    (results / "mute.json").write_text("{}")
    with pytest.raises(SystemExit, match="mute.json: expected the command"):
        script["recorded"](results)
