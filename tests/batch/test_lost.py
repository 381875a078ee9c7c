"""The end of a job: it notices that a folder, a manifest or an image was removed meanwhile."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmaccel.batch.manifest import Manifest
from mmaccel.cli import main
from mmaccel.outputs import image_files
from tests.batch.jobs import N_ITEMS, Jobs, content, lines
from tests.fixtures.tiny_model import CAPTIONS

Change = Callable[[Path], object]


def remake(out: Path) -> None:
    shutil.rmtree(out)
    out.mkdir()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


CHANGES: dict[str, tuple[Change, int, int]] = {  # files and lines that are missing then
    "the folder is made anew": (remake, 4, N_ITEMS),
    "no manifest": (lambda out: (out / "manifest.jsonl").unlink(), 0, N_ITEMS),
    "an empty manifest": (lambda out: (out / "manifest.jsonl").write_bytes(b""), 0, 4),
    "an image less": (lambda out: min(out.glob("*.png")).unlink(), 1, 0),
    "half an image": (lambda out: cut(min(out.glob("*.png"))), 1, 0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_removed_during_a_job_is_missing_at_its_end(
    whole: Path,
    jobs: Jobs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    change, n_files, n_lines = CHANGES[name]
    append, count = Manifest.append, []

    def changed(self: Manifest, record: dict[str, Any]) -> None:
        append(self, record)
        count.append(None)
        if len(count) == 4:
            change(jobs.out)

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "append", changed)
        assert jobs.run("--json") == 3
    said = capsys.readouterr()
    (answer,) = map(json.loads, said.out.splitlines())
    assert answer["error"]["code"] == "missing"
    assert answer["data"]["missing"] == max(n_files, n_lines)
    files = f"{n_files} image{'s' * (n_files != 1)}"
    assert f"but {files} and {n_lines} records of the manifest are missing there (" in said.err
    assert "_0_" in said.err and "try them again with --resume" in said.err
    assert jobs.run("--resume") == 0
    assert content(jobs.out) == content(whole)
    assert set(jobs.manifest.read_bytes().splitlines()) == set(lines(whole))


def test_a_wrong_line_is_named_and_its_image_made_again(
    whole: Path, jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, jobs.out)
    first, second, *others = map(json.loads, lines(whole))
    wrong = [first, second | {"bytes": second["bytes"] + 1}, *others]
    jobs.manifest.write_text("".join(json.dumps(line) + "\n" for line in wrong))
    for made in (1, 0):
        assert jobs.run("--resume", "--json") == 0
        said = capsys.readouterr()
        assert json.loads(said.out)["data"]["made"] == made
        assert ("note: manifest.jsonl, line 2: not the files in" in said.err) == bool(made)
    assert content(jobs.out) == content(whole)


def test_what_is_removed_during_a_run_is_missing_at_its_end(
    jobs: Jobs,
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write, count = image_files.write_whole, []

    def changed(file: Path, save: Any) -> None:
        count.append(None)
        if len(count) == 3:
            remake(jobs.out)
        write(file, save)

    monkeypatch.setattr(image_files, "write_whole", changed)
    arguments = ["generate", CAPTIONS[0], "--count", "4", "--seed", "0"]
    assert main([*arguments, "--model", str(tiny_folder), "--out", str(jobs.out)]) == 3
    said = capsys.readouterr()
    assert said.out == "" and "expected the 5 written files in" in said.err
    assert "a folder without 2 of them (0000-a-red-circle" in said.err
