"""What commands write over: their own files, and nothing that is no file."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmaccel.batch.manifest import Manifest
from mmaccel.cli import main
from mmaccel.commands.comfy import check_own, install
from mmaccel.errors import OptionError
from tests.batch.test_gallery import make_run
from tests.fixtures.special_files import SPECIAL, make_special, time_limit


@pytest.fixture(autouse=True)
def _limit() -> Iterator[None]:
    with time_limit(20):
        yield


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", ["one"])


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    """Arguments of a command that measures something small."""
    file = tmp_path / "texts.txt"
    file.write_text("a b\n")
    return ["evaluate", "words", str(file), str(file)]


def kind_of(file: Path) -> tuple[int, int]:
    """Number and kind of what has a name."""
    found = os.lstat(file)
    return found.st_ino, stat.S_IFMT(found.st_mode)


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("command", ["gallery", "its own page", "--json", "--items"])
def test_no_command_writes_over_what_is_no_file(
    run: Path, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str,
    command: str,
) -> None:  # fmt: skip
    if command == "its own page":
        file = make_special(kind, run).rename(run / "gallery.html")
        arguments = ["gallery", str(run)]
    else:
        home = tmp_path / "home"
        home.mkdir()
        file = make_special(kind, home)
        arguments = ["gallery", str(run), "--out"] if command == "gallery" else [*texts, command]
        arguments.append(str(file))
    before, there = kind_of(file), sorted(tmp_path.rglob("*"))
    assert main(arguments) == 2
    said = capsys.readouterr()
    option = command if command[0] == "-" else "--out"
    assert said.err.startswith(f"mmaccel: {option}: expected a file name, received {str(file)!r}")
    assert said.err.count("\n") == 1 and said.out == ""
    assert kind_of(file) == before and sorted(tmp_path.rglob("*")) == there


@pytest.mark.parametrize("kind", SPECIAL)
def test_no_manifest_is_opened_that_is_no_file(tmp_path: Path, kind: str) -> None:
    with pytest.raises(OptionError):
        Manifest(make_special(kind, tmp_path))


@pytest.mark.parametrize("name", ["manifest.jsonl", "r0_0_100.png"])
def test_a_page_replaces_no_file_of_another_kind(
    run: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    before = (run / name).read_bytes()
    assert main(["gallery", str(run), "--out", str(run / name)]) == 2
    assert "expected a new file or a page to replace" in capsys.readouterr().err
    assert (run / name).read_bytes() == before


EMPTY = "expected a path, received ''"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gallery", "run", "--out", ""], EMPTY),
        (["gallery", "run", "--out", "."], "--out: expected a file name, received '.', a folder"),
        (["generate", "--model", "none", "--out", ""], EMPTY),
        (["speak", "x", "--model", "none", "--out", ""], EMPTY),
        (["animate", "x", "--model", "none", "--out", ""], EMPTY),
        (["evaluate", "speed", "none", "--out", ""], EMPTY),
        (["evaluate", "exactness", "none", "--json", ""], EMPTY),
        (["evaluate", "pictures", "run", "--items", ""], EMPTY),
        (["evaluate", "export", "run", "--suite", "dpg", "--prompts", "p", "--out", ""], EMPTY),
        (
            ["evaluate", "export", "run", "--suite", "dpg", "--prompts", "p", "--out", "."],
            "--out: expected the name of a folder to create, received '.'",
        ),
    ],
)
def test_names_without_a_sense_are_answered_in_words(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(run.parent)
    there = sorted(run.parent.rglob("*"))
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and sorted(run.parent.rglob("*")) == there


def test_pipes_in_the_folder_of_a_node_pack_are_files_of_others(tmp_path: Path) -> None:
    folder = tmp_path / "mmaccel-nodes"
    install(folder)
    check_own(folder)
    os.mkfifo(folder / "pipe")
    with pytest.raises(OptionError, match="received pipe, which are others"):
        check_own(folder)
    (folder / ".mmaccel.json").unlink()
    os.mkfifo(folder / ".mmaccel.json")
    with pytest.raises(OptionError, match="received another"):
        check_own(folder)
