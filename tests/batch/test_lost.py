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
from tests.batch.test_batch import N_ITEMS, ROWS, command, content, lines
from tests.fixtures.tiny_model import CAPTIONS

Change = Callable[[Path], object]


def remake(out: Path) -> None:
    shutil.rmtree(out)
    out.mkdir()


def unlink_manifest(out: Path) -> None:
    (out / "manifest.jsonl").unlink()


def empty_manifest(out: Path) -> None:
    (out / "manifest.jsonl").write_bytes(b"")


def unlink_image(out: Path) -> None:
    min(out.glob("*.png")).unlink()


def cut_image(out: Path) -> None:
    file = min(out.glob("*.png"))
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("change", "n_files", "n_lines"),
    [
        (remake, 4, N_ITEMS),
        (unlink_manifest, 0, N_ITEMS),
        (empty_manifest, 0, 4),
        (unlink_image, 1, 0),
        (cut_image, 1, 0),
    ],
)
def test_what_is_removed_during_a_job_is_missing_at_its_end(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], change: Change, n_files: int, n_lines: int,
) -> None:  # fmt: skip
    whole = tmp_path / "whole"
    assert main(command(whole, ROWS, tiny_folder)) == 0
    arguments, out = command(tmp_path, ROWS, tiny_folder, "--json"), tmp_path / "out"
    append, count = Manifest.append, []

    def changed(self: Manifest, record: dict[str, Any]) -> None:
        append(self, record)
        count.append(None)
        if len(count) == 4:
            change(out)

    monkeypatch.setattr(Manifest, "append", changed)
    capsys.readouterr()
    assert main(arguments) == 3
    said = capsys.readouterr()
    (answer,) = map(json.loads, said.out.splitlines())
    assert answer["error"]["code"] == "missing"
    assert answer["data"]["missing"] == max(n_files, n_lines)
    files = f"{n_files} image{'s' * (n_files != 1)}"
    assert f"but {files} and {n_lines} records of the manifest are missing there (" in said.err
    assert "_0_" in said.err and "try them again with --resume" in said.err
    monkeypatch.undo()
    assert main([*arguments, "--resume"]) == 0
    assert content(out) == content(whole / "out")
    assert set((out / "manifest.jsonl").read_bytes().splitlines()) == set(lines(whole / "out"))


def test_what_is_removed_during_a_run_is_missing_at_its_end(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out, write, count = tmp_path / "out", image_files.write_whole, []

    def changed(file: Path, save: Any) -> None:
        count.append(None)
        if len(count) == 3:
            remake(out)
        write(file, save)

    monkeypatch.setattr(image_files, "write_whole", changed)
    arguments = [
        "generate",
        CAPTIONS[0],
        "--count",
        "4",
        "--seed",
        "0",
        "--model",
        str(tiny_folder),
    ]
    assert main([*arguments, "--out", str(out)]) == 3
    said = capsys.readouterr()
    assert said.out == "" and "expected the 5 written files in" in said.err
    assert "a folder without 2 of them (0000-a-red-circle" in said.err
