"""The command line as a whole: version, help, wrong commands, exit codes, what is printed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from mmaccel import cli
from mmaccel.cli import main
from mmaccel.commands.terminal import make_table, printable, wide_console
from tests.architecture.source import run_python

Said = pytest.CaptureFixture[str]


@pytest.mark.slow
def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom mmaccel.cli import main\n"
        "codes = main(['generate', '--help']), main(['evaluate', 'speed', '--help'])\n"
        "heavy = {'torch', 'transformers', 'PIL', 'numpy'} & set(sys.modules)\n"
        "assert codes == (0, 0) and not heavy, heavy"
    )
    done = run_python(program)
    assert done.returncode == 0, done.stderr
    assert "--guidance" in done.stdout and "--batch-sizes" in done.stdout


def test_a_wrong_command_is_one_line_and_one_alone_prints_its_help(capsys: Said) -> None:
    assert main(["paint"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "paint" in captured.err
    for command in ([], ["evaluate"]):
        assert main(command) == 2
        captured = capsys.readouterr()
        assert captured.err == "" and "\nCommands:\n" in captured.out


@pytest.mark.parametrize("command", ["generate x", "doctor", "serve --model y"])
def test_a_working_folder_that_was_removed(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(command.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "working folder: expected one that exists" in line


def test_imports_warn_of_nothing_and_errors_remain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def work(**_: Any) -> None:
        logging.getLogger("torchao").warning("Failed to load a library")
        logging.getLogger("torchao").error("a real error")

    monkeypatch.setattr(cli, "_command", lambda: work)
    assert main(["doctor"]) == 0 and caplog.messages == ["a real error"]
    logging.getLogger("torchao").warning("after the command")
    assert caplog.messages[-1] == "after the command"


def test_markup_and_escapes_of_users_are_shown_as_text(capsys: Said) -> None:
    table = make_table("what", title="[/nope]\x1b]0;title\x07")
    table.add_row("[red]x[/nope] :smile:\x9b31m")
    wide_console().print(table)
    said = capsys.readouterr().out
    assert all(text in said for text in ("[red]x[/nope]", ":smile:", r"\x1b]0;"))
    assert not any(c in said for c in "\x1b\x07\x9b")
    kept = "caf\u00e9 \u4e2d\u6587 \u00a0 \U0001f469\u200d\U0001f680\n"
    assert printable(kept + "\x1b\u202e\udcff") == kept + r"\x1b\u202e\udcff"
