"""Checkpoints of strangers are refused in words, in seconds, and in little memory."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmaccel.cli import main
from mmaccel.errors import MMAccelError
from tests.architecture.source import ROOT
from tests.fixtures.hostile import (
    CASES,
    DEEP,
    LARGE,
    SECONDS,
    SMALL,
    SPARE,
    Case,
    try_doors,
    write,
)
from tests.fixtures.speech import build_speech
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.tiny_model import build_tiny, masked_beside_plain
from tests.fixtures.video import build_video

Builder = Callable[[str], tuple[Path, Path | None]]
Plant = Callable[[Case, Path], tuple[Path, Path | None]]


@pytest.fixture(scope="module")
def plant(built: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Plant:
    """Copies a tiny checkpoint (and its codec) into a folder and spoils it."""
    bases: dict[str, tuple[Path, Path | None]] = {}

    def build(name: str) -> tuple[Path, Path | None]:
        folder = tmp_path_factory.mktemp(f"base-{name}")
        if name == "scenes":
            return build_tiny(folder / "scenes"), None
        if name == "masked":
            return masked_beside_plain(folder)[0], None
        if name == "lm":
            build_lm("llama").save_pretrained(folder / "lm")
            return folder / "lm", None
        if name in ("llasa", "orpheus"):
            return build_speech(name, folder)
        return build_video(folder) if name == "cosmos" else (built(name), None)

    def plant(case: Case, folder: Path) -> tuple[Path, Path | None]:
        if case.base not in bases:
            bases[case.base] = build(case.base)
        model, codec = bases[case.base]
        is_file = model.is_file()  # of LlamaGen
        top = model.parent if is_file or case.base == "masked" else model
        copy = shutil.copytree(top, folder / top.name)
        own = copy / model.name if top is not model else copy
        own_codec = (
            None if codec is None else shutil.copytree(codec, folder / f"codec-{codec.name}")
        )
        spoilt = own_codec if case.door == "codec" else own.parent if is_file else own
        assert spoilt is not None
        case.spoil(spoilt)
        return own, own_codec

    return plant


def check(case: Case, found: dict[str, Any]) -> None:
    """Check what came of a case."""
    text = found["text"]
    kinds = {kind.__name__ for kind in MMAccelError.__subclasses__()}
    if case.base == "lm" and found["kind"] == "none":
        text = found["lines"]["doctor"][1]  # the command makes a row of its report of the error
    else:
        assert found["kind"] in kinds & {"UnsupportedModelError", "OptionError"}, found
        assert "\n" not in text and len(text) < 700
        assert "expected" in text and "received" in text and ";" in text, text
    assert re.search(case.said, " ".join(text.split())), text
    assert found["seconds"] < SECONDS and found["grown"] < SPARE, found
    for command, (code, said) in found["lines"].items():
        assert code in (case.doctor if command == "doctor" else (1, 2)), (command, code, said)
        assert "Traceback" not in said, (command, said)
        assert command == "doctor" or said.count("\n") == 1, said


@pytest.mark.parametrize("case", SMALL, ids=[case.name for case in SMALL])
def test_a_hostile_folder_is_refused_in_words(case: Case, plant: Plant, tmp_path: Path) -> None:
    check(case, try_doors(case, *plant(case, tmp_path)))


def test_sizes_are_refused_before_memory_is_filled(plant: Plant, tmp_path: Path) -> None:
    """All in one process that may take 2 GiB beyond what its imports took."""
    asked = [
        (case.name, *map(_text, plant(case, tmp_path / str(k)))) for k, case in enumerate(LARGE)
    ]
    made = subprocess.run(
        [sys.executable, "-m", "tests.fixtures.hostile"], input=json.dumps(asked), cwd=ROOT,
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-2000:]
    found = json.loads(made.stdout.splitlines()[-1])
    for case in LARGE:
        check(case, found[case.name])


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def test_bench_reads_its_folders_within_limits(tmp_path: Path, capsys: Any) -> None:
    scenes = build_tiny(tmp_path / "scenes")
    write("card.json", DEEP)(scenes)
    plain = ["bench", "a red circle", "--count", "1", "--policies", "jacobi", "--windows", "4"]
    assert main([*plain, "--model", str(scenes)]) == 1
    said = capsys.readouterr().err
    assert "card.json, received more than" in " ".join(said.split()), said


def test_there_are_enough() -> None:
    assert len(CASES) >= 60 and len({case.name for case in CASES}) == len(CASES)
