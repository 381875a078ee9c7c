"""`mmaccel bench` without policies: four rows, of which the first is transformers' generate."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from benchmarks.report import fill_tables
from mmaccel import TextToImage
from mmaccel.cli import main
from mmaccel.commands.bench import peers as bench_peers
from mmaccel.evaluation.speed import transformers_baseline
from tests.fixtures.tiny_model import CAPTIONS, N_TOKENS

SETTINGS = [
    "Jacobi(window=32, drafts='auto')",
    "GroupedSpeculative(window=16, group=7, max_gap=0.15, coupling='maximal', drafts='auto', "
    "groups='ranks', neighbours=16, delta=0.1, cap=None)",
    "SpeculativeJacobi(window=16, coupling='independent', drafts='random')",
]
MARK = "<!-- table: first-screen -->\nold\n<!-- end -->"


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are traced, and run as they are: the same shapes and counts in a second."""
    monkeypatch.setattr(transformers_baseline, "BACKEND", "eager")


def bench(folder: Path, file: Path, *arguments: str) -> int:
    fixed = ["--model", str(folder), "--count", "2", "--json", str(file)]
    return main(["bench", CAPTIONS[0], *fixed, *arguments])


def test_four_rows_at_two_scales(
    tiny_folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.json"
    monkeypatch.setattr(sys, "argv", ["mmaccel", "bench", "--seed", "5"])
    assert bench(tiny_folder, file, "--seed", "5") == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    rows = report["first_screen"]
    first = f"transformers {transformers.__version__}, compiled"
    assert [row["label"] for row in rows] == [first, *bench_peers._POLICIES] * 2
    assert [row["guidance"] for row in rows] == [1.0] * 4 + [2.0] * 4
    for four in (rows[:4], rows[4:]):
        assert [row["settings"] for row in four] == ["compiled", *SETTINGS]
        assert [row["promise"] for row in four] == (
            ["reference", "bitwise", "relaxed", "distribution"]
        )
        assert [row["identical"] for row in four[:2]] == [2, 2]  # generate's own tokens
        assert four[0]["passes"] == N_TOKENS > four[1]["passes"] and four[0]["speed_up"] == 1.0
        for row in four:
            assert row["images"] == 2 and row["seconds"] > 0
            assert row["passes"] * row["tokens_per_pass"] == pytest.approx(N_TOKENS)
            assert row["speed_up"] == pytest.approx(four[0]["seconds"] / row["seconds"])
    assert report["count"] == 2 and report["machine"]["versions"]["transformers"]
    assert report["command"] == "mmaccel bench --seed 5"
    said = capsys.readouterr()
    assert first in said.out and "2/2" in said.out and "guidance 2: transformers" in said.err
    table = fill_tables(MARK, {"scenes-cpu-batch1": {"rows": []}, "first-screen": report})
    lines = [line for line in table.splitlines() if line.startswith("| 1 |")]
    assert len(lines) == 4 and "| reference |" in lines[0] and "old" not in table
    spent = rows[2]["total_variation"]
    assert f"| relaxed, total variation {spent:.3f} a token |" in lines[2] and spent > 0
    row = rows[1]
    figures = f"{row['tokens_per_pass']:.2f} | {row['seconds']:.3f} | {row['speed_up']:.2f}× |"
    assert f"| 1 | Jacobi, as it comes | {figures} 2 of 2 | bitwise |" == lines[1]
    assert "Made by `mmaccel" in table and f"transformers {transformers.__version__}" in table
    assert "Not yet measured." in fill_tables(MARK, {"a": {"rows": []}})


def test_without_a_compiler_the_first_row_says_so(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fail(device: Any) -> None:
        raise RuntimeError("no g++ here")

    monkeypatch.setattr(transformers_baseline, "_compile", fail)
    file = tmp_path / "a.json"
    assert bench(tiny_folder, file, "--guidance", "1") == 0
    rows = json.loads(file.read_text(encoding="utf-8"))["first_screen"]
    assert rows[0]["label"] == f"transformers {transformers.__version__}, not compiled"
    assert rows[0]["settings"] == "static" and rows[0]["identical"] == rows[1]["identical"] == 2
    said = " ".join(capsys.readouterr().err.split())
    assert ", compiled, is left out: torch.compile does not work here" in said


def test_a_model_that_generate_cannot_decode(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(transformers_baseline, "CausalLMWindow", None)
    file = tmp_path / "a.json"
    assert bench(tiny_folder, file, "--guidance", "1") == 0
    rows = json.loads(file.read_text(encoding="utf-8"))["first_screen"]
    assert rows[0]["label"] == "the plain loop of mmaccel"
    assert rows[0]["settings"] == "Autoregressive()" and len(rows) == 4
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("is left out: transformers' generate makes no images") == 2


def test_ctrl_c_keeps_the_images_that_all_four_have(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    stream, begun = TextToImage.stream, []

    def stop(pipe: TextToImage, *args: Any, **options: Any) -> Any:
        begun.append(options["seed"])
        if len(begun) == 5:  # of three sides a round; generate is none of them
            raise KeyboardInterrupt
        return stream(pipe, *args, **options)

    monkeypatch.setattr(TextToImage, "stream", stop)
    file = tmp_path / "a.json"
    assert bench(tiny_folder, file) == 130
    rows = json.loads(file.read_text(encoding="utf-8"))["first_screen"]
    assert [(row["guidance"], row["images"]) for row in rows] == [(1.0, 1)] * 4
    assert "stopped; measured 1 of 4 images a row" in capsys.readouterr().err
