"""The command line as a whole: version, help, wrong commands, exit codes, tables."""

from __future__ import annotations

import io
import logging
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mmaccel
from mmaccel import cli
from mmaccel.cli import main
from mmaccel.commands.terminal import make_table
from tests.architecture.source import ROOT


def test_version(capsys) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mmaccel {mmaccel.__version__}\n"


def test_python_runs_the_package(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["mmaccel", "--version"])
    with pytest.raises(SystemExit, match="^0$"):
        runpy.run_module("mmaccel", run_name="__main__")
    assert capsys.readouterr().out == f"mmaccel {mmaccel.__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom mmaccel.cli import main\n"
        "codes = main(['generate', '--help']), main(['evaluate', 'speed', '--help'])\n"
        "heavy = {'torch', 'transformers', 'PIL', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "assert codes == (0, 0) and not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--guidance" in done.stdout and "--batch-sizes" in done.stdout


def test_a_wrong_command(capsys) -> None:
    assert main(["paint"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "paint" in captured.err


@pytest.mark.parametrize("command", [[], ["evaluate"]])
def test_a_command_alone_prints_its_help(command: list[str], capsys) -> None:
    assert main(command) == 2
    captured = capsys.readouterr()
    assert captured.err == "" and "\nCommands:\n" in captured.out


@pytest.mark.parametrize(
    "command",
    [
        "generate x",
        "models",
        "doctor",
        "gallery out",
        "bench",
        "serve --model y",
        "speak x --model y",
    ],
)
def test_a_working_folder_that_was_removed(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(command.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert "working folder: expected one that exists" in captured.err
    assert main(["--version"]) == 0


def test_typers_own_exit_code_for_ctrl_c_is_reported(monkeypatch, capsys) -> None:
    monkeypatch.setattr(cli, "_command", lambda: lambda **_: 130)
    assert main(["models"]) == 130
    assert capsys.readouterr().err == "mmaccel: stopped\n"


def test_imports_warn_of_nothing_and_errors_remain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("torchao", "torch.utils._pytree")
    monkeypatch.setattr([logging.getLogger(name) for name in names][1], "propagate", True)

    def work(**_: Any) -> None:
        for name in names:
            logging.getLogger(name).warning("Failed to load a library")
            logging.getLogger(name).error("a real error of %s", name)

    monkeypatch.setattr(cli, "_command", lambda: work)
    assert main(["doctor"]) == 0
    assert caplog.messages == [f"a real error of {name}" for name in names]
    logging.getLogger("torchao").warning("after the command")
    assert caplog.messages[-1] == "after the command"


def test_narrow_terminals_break_cells_and_cut_none() -> None:
    from rich.console import Console

    table = make_table("policy", *("tokens a pass", "promise"))
    table.add_row("jacobi 32", "4.7213579±0.12", "distribution 0.123")
    stream = io.StringIO()
    Console(file=stream, width=24).print(table)
    said = stream.getvalue()
    assert "…" not in said and "jacobi 32" in said
    assert sorted(c for c in said if c.isdigit()) == sorted("3247213579012" + "0123")
