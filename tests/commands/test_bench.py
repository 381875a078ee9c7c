"""`mmaccel bench`: images side by side."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from benchmarks.report import fill_tables
from mmaccel import TextToImage, loading
from mmaccel.catalog import read_policy
from mmaccel.cli import main
from mmaccel.commands.bench import PEERS
from mmaccel.evaluation import transformers_baseline
from mmaccel.options import LoadOptions
from tests.fixtures.tiny_model import CAPTIONS, N_TOKENS

KEYS = {  # of a row in the file, which other programs read
    *("policy", "window", "dtype", "drafts", "guidance", "settings", "route", "exactness"),
    *("images", "passes", "tokens_per_pass", "half_width", "seconds", "speed_up", "identical"),
    *("sampler_share", "total_variation", "promise"),
}
MARK = "<!-- table: first-screen -->\nold\n<!-- end -->"


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are traced, and run as they are: the same shapes and counts in a second."""
    monkeypatch.setattr(transformers_baseline, "BACKEND", "eager")


def bench(folder: Path, file: Path, *more: object) -> int:
    return main(["bench", CAPTIONS[0], "--model", *map(str, (folder, "--json", file, *more))])


@pytest.mark.slow
def test_dtypes_are_compared_with_the_first_and_nothing_is_measured_twice(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compiled in the middle of a measurement either: "auto" would do that."""
    asked = []

    def load(name: str, given: LoadOptions, **options: Any) -> TextToImage:
        asked.append((given.dtype, given.fused, given.compile))
        return open_own(name, replace(given, compile=False), **options)  # compiling takes long

    open_own = loading.open_pipeline
    monkeypatch.setattr(loading, "open_pipeline", load)
    file = tmp_path / "bench.json"
    more = ["--windows", "4,04,4", "--guidance", "1,1.0", "--count", 1, "--compile", "--no-fused"]
    more += ["--policies", "jacobi,jacobi,sjd", "--dtypes", "float32,bfloat16"]
    assert bench(tiny_folder, file, *more) == 0
    rows = json.loads(file.read_text())["rows"]
    exact = [("autoregressive", "bitwise"), ("jacobi", "bitwise"), ("sjd", "distribution")]
    rounded = [(name, "up to rounding") for name, _ in exact[:2]] + exact[2:]
    wanted = [("float32", *each) for each in exact] + [("bfloat16", *each) for each in rounded]
    assert [(row["dtype"], row["policy"], row["promise"]) for row in rows] == wanted
    assert [row["identical"] for row in rows[:2]] == [1, 1]
    assert rows[0]["speed_up"] == 1.0 != rows[3]["speed_up"]
    assert {key for row in rows for key in row} == KEYS
    for row in rows:
        assert row["passes"] * row["tokens_per_pass"] == pytest.approx(N_TOKENS)
        assert 0 < row["sampler_share"] < 1 and row["seconds"] > 0
    assert {row["route"] for row in rows} == {"model"}
    assert asked == [("float32", False, True), ("bfloat16", False, True)]


@pytest.mark.slow
def test_four_rows_at_two_scales(
    tiny_folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.json"
    monkeypatch.setattr(sys, "argv", ["mmaccel", "bench", "--seed", "5"])
    assert bench(tiny_folder, file, "--seed", "5", "--count", 2) == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    rows = report["first_screen"]
    first = f"transformers {transformers.__version__}, compiled"
    assert [row["label"] for row in rows] == [first, *PEERS] * 2
    for scale, four in ((1.0, rows[:4]), (2.0, rows[4:])):
        settings = [repr(read_policy(text)) for text in PEERS.values()]
        assert [row["settings"] for row in four] == ["compiled", *settings]
        assert [row["promise"] for row in four] == (
            ["reference", "bitwise", "relaxed", "distribution"]
        )
        assert [row["identical"] for row in four[:2]] == [2, 2]  # generate's own tokens
        assert four[0]["passes"] == N_TOKENS > four[1]["passes"] and four[0]["speed_up"] == 1.0
        assert all(row["images"] == 2 and row["guidance"] == scale for row in four)
        assert four[2]["speed_up"] == pytest.approx(four[0]["seconds"] / four[2]["seconds"])
    assert report["count"] == 2 and report["command"] == "mmaccel bench --seed 5"
    assert first in capsys.readouterr().out
    table = fill_tables(MARK, {"scenes-cpu-batch1": {"rows": []}, "first-screen": report})
    lines = [line for line in table.splitlines() if line.startswith("| 1 |")]
    assert len(lines) == 4 and "| reference |" in lines[0] and "old" not in table


@pytest.mark.slow
def test_a_first_row_that_cannot_be_is_replaced(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fail(device: Any) -> None:
        raise RuntimeError("no g++ here")

    monkeypatch.setattr(transformers_baseline, "_compile", fail)
    file = tmp_path / "a.json"
    more = ("--guidance", "1", "--count", 1)
    assert bench(tiny_folder, file, *more) == 0
    row = json.loads(file.read_text(encoding="utf-8"))["first_screen"][0]
    assert row["label"] == f"transformers {transformers.__version__}, not compiled"
    assert ", compiled, is left out: torch.compile" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr(transformers_baseline, "CausalLMWindow", None)
    assert bench(tiny_folder, file, *more) == 0
    row = json.loads(file.read_text(encoding="utf-8"))["first_screen"][0]
    assert row["label"] == "the plain loop of mmaccel" and row["settings"] == "Autoregressive()"


@pytest.mark.slow
def test_ctrl_c_keeps_the_rounds_that_all_sides_have(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file, calls, stream = tmp_path / "bench.json", list[Any](), TextToImage.stream

    def stop(pipe: TextToImage, *args: Any, **options: Any) -> Any:
        calls.append(options["seed"])
        if len(calls) == 8:  # the second of the third round, behind one that warms up
            raise KeyboardInterrupt
        return stream(pipe, *args, **options)

    monkeypatch.setattr(TextToImage, "stream", stop)
    more = ("--windows", "4", "--guidance", "1.0", "--count", "5", "--policies", "jacobi")
    assert bench(tiny_folder, file, *more) == 130
    report = json.loads(file.read_text())
    assert len(report["captions"]) == 2 and [row["images"] for row in report["rows"]] == [2, 2]
    assert calls == [[0], [0], [0], [0], [1], [1], [2], [2]]
    assert "stopped; measured 2 of 5 images a row" in capsys.readouterr().err


def test_the_table_is_printed_although_results_are_not_written(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fail(self: Path, *_: Any, **__: Any) -> None:
        raise OSError("disk is full")

    monkeypatch.setattr(Path, "write_text", fail)
    file = tmp_path / "bench.json"
    assert bench(tiny_folder, file, "--policies", "jacobi", "--windows", "4", "--count", 1) == 1
    captured = capsys.readouterr()
    assert "jacobi 4" in captured.out and "disk is full" in captured.err and not file.exists()
