"""The command line at its edges: closed outputs, odd terminals, interrupts, huge numbers."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mmaccel import cli
from mmaccel.cli import main
from mmaccel.commands import bench as bench_command
from mmaccel.commands import image_job as image_job
from mmaccel.commands.terminal import make_table
from tests.fixtures.tiny_model import CAPTIONS

ROOT = Path(__file__).parents[2]


def bench(tiny_folder: Path, *arguments: str) -> int:
    fixed = ["--model", str(tiny_folder), "--count", "1", "--windows", "4"]
    return main(["bench", CAPTIONS[0], *fixed, "--guidance", "1.0", *arguments])


@pytest.mark.parametrize("named", [("--window", "4", "window=5"), ("--max-gap", "1", "max_gap=1")])
def test_a_field_is_given_once(named: tuple[str, ...], capsys: Any) -> None:
    option, value, field = named
    assert main(["generate", CAPTIONS[0], option, value, "--set", field]) == 2
    assert f"{option}: expected it once, received {value}" in capsys.readouterr().err


def test_results_are_written_although_the_table_is_not_printed(
    tiny_folder: Path, tmp_path: Path, monkeypatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("stdout is full")

    monkeypatch.setattr(bench_command, "_print", fail)
    file = tmp_path / "bench.json"
    assert bench(tiny_folder, "--policies", "jacobi", "--json", str(file)) == 1
    assert [row["policy"] for row in json.loads(file.read_text())["rows"]][1] == "jacobi"


def test_the_table_is_printed_although_results_are_not_written(
    tiny_folder: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    def fail(self: Path, *_: Any, **__: Any) -> None:
        raise OSError("disk is full")

    monkeypatch.setattr(Path, "write_text", fail)
    file = tmp_path / "bench.json"
    assert bench(tiny_folder, "--policies", "jacobi", "--json", str(file)) == 1
    captured = capsys.readouterr()
    assert "jacobi 4" in captured.out and "disk is full" in captured.err and not file.exists()


def test_a_name_that_cannot_be_written_is_found_before_anything_is_measured(
    tiny_folder: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr("mmaccel.commands.measure.measure", None)  # would not be callable
    assert bench(tiny_folder, "--json", str(tmp_path / ("x" * 250))) == 1
    assert "File name too long" in capsys.readouterr().err
    os.mkfifo(tmp_path / "pipe")
    assert bench(tiny_folder, "--json", str(tmp_path / "pipe")) == 2
    assert "--json: expected a file name" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["pipe"]


def test_bench_says_what_is_left_of_a_promise(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    options = ["--policies", "jacobi,sjd", "--dtypes", "bfloat16", "--json", str(file)]
    assert bench(tiny_folder, *options) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [r["promise"] for r in rows] == ["up to rounding", "up to rounding", "distribution"]


def test_bench_measures_everything_once(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    options = ["--policies", "jacobi,jacobi", "--windows", "4,04,4", "--guidance", "1,1.0"]
    assert bench(tiny_folder, *options, "--json", str(file)) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(r["policy"], r["window"]) for r in rows] == [("autoregressive", None), ("jacobi", 4)]


def test_bench_refuses_a_policy_that_nothing_is_left_to_measure_of(
    tiny_folder: Path, capsys
) -> None:
    assert bench(tiny_folder, "--policies", "jacobi,sjd", "--windows", "adaptive") == 2
    assert "--windows: expected a fixed width for sjd" in capsys.readouterr().err
    assert bench(tiny_folder, "--policies", "jacobi,nonsense", "--windows", "adaptive") == 2
    assert "received 'nonsense'" in capsys.readouterr().err
    assert bench(tiny_folder, "--policies", "autoregressive", "--windows", "adaptive,0") == 2
    assert "window: expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "gsd", "--group", "9" * 30], "group: expected an integer in 0..2147483647"),
        (["--policy", "gsd", "--max-gap", "5e-324"], "max_gap: expected a number in 1e-06..1"),
        (["--window", "999999999999"], "window: expected an integer in 1..4096"),
        (["--device", "meta"], "device: expected a device of this machine, received 'meta'"),
        (["--device", "kitchen"], "device: expected a device of this machine"),
        (["--guidance", "1e999"], "guidance_scale: expected a finite number"),
        (["--temperature", "1e999"], "temperature: expected a finite number >= 0"),
    ],
)
def test_numbers_out_of_reach(arguments: list[str], said: str, tiny_folder: Path, capsys) -> None:
    assert main(["generate", CAPTIONS[0], "--model", str(tiny_folder), *arguments]) == 2
    captured = capsys.readouterr().err
    assert said in captured and captured.count("\n") == 1


def test_ctrl_c_before_the_first_image_is_said(
    tiny_folder: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mmaccel.loading.open_pipeline", stop)
    options = ["--model", str(tiny_folder), "--out", str(tmp_path / "out")]
    assert main(["generate", CAPTIONS[0], *options]) == 130
    assert capsys.readouterr().err == "mmaccel: stopped\n"


def test_warming_up_takes_no_more_rows_than_there_are_images(
    tiny_folder: Path, tmp_path: Path, monkeypatch
) -> None:
    rows = []
    monkeypatch.setattr(image_job, "warm_up", lambda *arguments: rows.append(arguments[-1]))
    options = ["--compare", "--count", "2", "--batch-size", "500", "--out", str(tmp_path)]
    assert main(["generate", CAPTIONS[0], "--model", str(tiny_folder), *options]) == 0
    assert rows == [2, 2]


def test_a_terminal_that_knows_ascii_only(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "bilder-é-画"
    arguments = ["--model", str(tiny_folder), "--out", str(out), "--count", "1", "--compare"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mmaccel.cli", "generate", CAPTIONS[0], *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "\\xe9" in done.stdout and len(list(out.iterdir())) == 2


def test_narrow_terminals_break_cells_and_cut_none() -> None:
    from rich.console import Console

    table = make_table("policy", *("tokens a pass", "promise"))
    table.add_row("jacobi 32", "4.7213579±0.12", "distribution 0.123")
    stream = io.StringIO()
    Console(file=stream, width=24).print(table)
    said = stream.getvalue()
    assert "…" not in said and "jacobi 32" in said
    assert sorted(c for c in said if c.isdigit()) == sorted("3247213579012" + "0123")


def test_typers_own_exit_code_for_ctrl_c_is_said(monkeypatch, capsys) -> None:
    monkeypatch.setattr(cli, "app", lambda **_: 130)
    assert main(["models"]) == 130
    assert capsys.readouterr().err == "mmaccel: stopped\n"
