"""The check on GPUs without one: its record, processes, tables, and a part of every kind, tiny."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.check import main, make_calls, run_process
from benchmarks.gpu.parts import CheckError, Part, Report, failed_parts, run_parts
from benchmarks.report import FIGURES, fill_tables
from mmaccel.errors import OptionError
from tests.architecture.source import ROOT
from tests.kernels import gpu_cases
from tests.kernels.case import Case, Lane

CPU = torch.device("cpu")
FACTS = {"device": "A", "versions": {"torch": "2"}, "sources": "x", "commit": "c", "command": "m"}


class Bench:
    """Parts a, b and c that note their runs; b raises `error`."""

    def __init__(self, file: Path) -> None:
        self.file, self.runs = file, ""
        self.error: BaseException | None = None

    def part(self, name: str) -> Part:
        def run(device: torch.device) -> dict[str, Any]:
            self.runs += name
            if name == "b" and self.error is not None:
                raise self.error
            return {"figures": {"product": 3.0}}

        return run

    def run(self, facts: dict[str, Any] = FACTS, **options: Any) -> Report:
        made = run_parts(
            {name: self.part(name) for name in "abc"}, self.file, facts, CPU, **options
        )
        assert self.read() == made
        return made

    def read(self) -> Report:
        report: Report = json.loads(self.file.read_text(encoding="utf-8"))
        return report


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "new" / "gpu-a.json")


def test_parts_run_once_for_the_same_device_versions_and_sources(bench: Bench) -> None:
    assert bench.run(only=["b"])["left"] == ["a", "c"]
    assert bench.run(budget=0)["left"] == ["c"]  # the first always runs
    assert bench.run()["left"] == [] and bench.run() and bench.runs == "bac"
    bench.run(again=True)
    bench.run({**FACTS, "sources": "y"})
    assert bench.runs == "bac" + 2 * "abc"
    with pytest.raises(OptionError, match="part: expected one of a, b, c, received 'd'"):
        bench.run(only=["d"])


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "message", "runs"),
    [
        (AssertionError("3 is not 4"), "AssertionError: 3 is not 4", "abcb"),
        (CheckError("1 of 4", {"failed": {"x": "y"}}), "1 of 4", "abcb"),
        (RuntimeError("CUDA error: illegal access"), "RuntimeError: CUDA error: illegal", "abcb"),
        (Killed(), "it began and did not end", "abcb"),
    ],
)
def test_what_fails_is_kept_and_runs_again_after_the_others(
    bench: Bench, error: BaseException, message: str, runs: str
) -> None:
    bench.error = error
    if isinstance(error, CheckError | AssertionError):
        bench.run()
    else:  # an error of the device ends a call, as does what kills it
        with pytest.raises(type(error)):
            bench.run()
        assert bench.runs == "ab" and bench.read()["left"] == ["c"]
    part = bench.read()["parts"]["b"]
    assert failed_parts(bench.read()) == ["b"] and part["message"].startswith(message)
    assert part.get("failed") == getattr(error, "found", {}).get("failed")
    bench.error = None
    assert failed_parts(bench.run()) == [] and bench.runs == runs


def test_cases_that_fail_are_named_and_a_lost_device_ends_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check(lane: Lane) -> None:
        assert lane.dtype == torch.float32, "they part"

    def lose(lane: Lane) -> None:
        raise RuntimeError("CUDA error: launch failure")

    cases = [Case("good", lambda lane: None), Case("bad", check), Case("large", lose, large=True)]
    monkeypatch.setattr(gpu_cases, "cases_of", lambda kernel: cases)
    with pytest.raises(CheckError, match="1 of 4 cases failed: bad, float16") as caught:
        gpu_cases.run_cases("x", CPU)
    assert caught.value.found["failed"]["bad, float16"].startswith("AssertionError: they part")
    cases[:] = [Case("lost", lose)]
    with pytest.raises(RuntimeError, match="launch failure"):
        gpu_cases.run_cases("x", CPU)


WRITE = "import json, sys; json.dump({'parts': {'a': %s}}, open(sys.argv[2] + '/gpu.json', 'w'))"


@pytest.mark.slow
def test_a_part_in_a_process_of_its_own() -> None:
    def run(program: str, limit: float = 60.0) -> dict[str, Any]:
        return run_process([sys.executable, "-c", program], "a", limit)

    passed = {"status": "passed", "message": "", "date": "d", "figures": {"x": 1.0}}
    assert run(WRITE % passed) == {"figures": {"x": 1.0}}
    with pytest.raises(CheckError, match="no") as caught:
        run(WRITE % {"status": "failed", "message": "no", "rows": [1]})
    assert caught.value.found == {"rows": [1]}
    with pytest.raises(CheckError, match="its process ended with -9 and no result"):
        run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(CheckError, match="did not end in 0 s"):
        run("import time; time.sleep(60)", 0.2)


def test_tables_have_the_newest_part_and_the_worst_of_several() -> None:
    row = {"kernel": "noise", "name": "large", "torch_ms": 9.0, "triton_ms": 0.125}
    row |= {"gb_per_s": 4000.4, "share_of_copy": 0.815}

    def report(device: str, date: str, **parts: float) -> Report:
        made = {
            name: {"status": "passed", "date": date, "figures": {"product": x}, "timings": [row]}
            for name, x in parts.items()
        }
        return {**FACTS, "device": device, "date": date, "parts": made}

    reports = {
        "gpu-a": report("A", "2026-02-02T00", p=7.0, q=6.0),
        "gpu-a-old": report("A", "2026-01-01T00", p=5.0),
        "gpu-b": report("B", "2026-03-03T00", p=1.0),
    }
    reports["gpu-b"]["parts"]["p"]["status"] = "failed"
    marks = "<!-- table: gpu-figures -->\n<!-- end -->\n<!-- table: gpu-kernels -->\n<!-- end -->"
    filled = fill_tables(marks, reports)
    assert "| figure | target | A | B |" in filled and "5.00×" not in filled
    assert "| 6.00× | not yet measured |" in filled and "2026-02-02, by `m`" in filled
    assert filled.count("| `noise` | large | 9.000 | 0.125 | 4000 | 82 % |") == 1
    assert fill_tables(marks, {}).count("| not yet measured |") == len(FIGURES)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens where there is no GPU")
def test_without_a_gpu_one_line_and_nothing_written(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts" / "gpu_check.py", "--out", tmp_path / "r"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr == "" and not (tmp_path / "r").exists()
    (line,) = done.stdout.splitlines()
    assert "expected a GPU" in line and "nothing was written" in line


@pytest.mark.slow
def test_the_script_needs_few_packages() -> None:
    program = (
        "import sys, runpy; runpy.run_path(sys.argv[1], run_name='x'); "
        "print(*[n for n in ('typer', 'rich', 'transformers', 'PIL', 'pytest', 'diffusers', "
        "'einops', 'safetensors') if n in sys.modules])"
    )
    command = [sys.executable, "-c", program, str(ROOT / "scripts" / "gpu_check.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


TINY = (
    "engine-promise-tiny-llama-fused",
    "engine-bitwise-attached",
    "methods-books",
    "engine-step-emu3-8b-24",
    "scenes-1",
    "profile-janus-pro-1b",
    "long-llama-3-1-8b-1-8192",
    "chunks",
    "products-janus-pro-1b",
    "depth-chain",
    "time-compact",
    "time-window_attention-4",
    "time-window_attention-ragged",
)


@pytest.mark.slow
def test_the_check_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A part of every kind, tiny: the report is whole, and no figure comes of it."""
    chosen = [text for name in TINY for text in ("--part", name)]
    assert main(["--device", "cpu", "--tiny", "--out", str(tmp_path), *chosen], "") == 0
    (file,) = tmp_path.iterdir()
    assert file.name == "check-cpu-tiny-sizes.json"  # which is in no table of the docs
    report = json.loads(file.read_text())
    assert set(report["parts"]) == set(TINY) and report["device"] == "cpu, tiny sizes"
    assert not any(part.get("figures") for part in report["parts"].values())
    assert "left for the next call: engine-bitwise" in capsys.readouterr().out
    books = report["parts"]["methods-books"]["methods"]
    assert len(books) == 12 and all(row["same"] == 1 and row["passes"] > 1 for row in books)
    own = report["parts"]["scenes-1"]["scenes"]
    assert [row["route"] for row in own] == ["library", "library-static", "direct", "direct"]
    # the tables take every row that the parts write
    report["device"] = "A"
    for part in report["parts"].values():
        for row in part.get("steps", ()):
            row["windows_ms"] = row["window_ratios"] = {"32": 1.0, "64": 2.0}
    names = ("steps", "scenes")
    marks = "\n".join(f"<!-- table: gpu-{name} -->\n<!-- end -->" for name in names)
    filled = fill_tables(marks, {"gpu-a": report})
    assert "| Emu3-8B | model | own: the model is on cpu; not captured: CUDA" in filled
    assert "| transformers alone | its own | 1.00 |" in filled


def test_a_call_is_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = make_calls(CPU, tiny=True)
    steps = [f"engine-step-janus-pro-{size}-24" for size in ("1b", "7b")]
    assert list(calls["llama"]) == steps and set(TINY) < {n for own in calls.values() for n in own}
    alone = make_calls(torch.device("cuda"), alone=True)
    assert "cases-noise" in alone["correctness"] and "scenes-64" in alone["others"]
    assert len(alone["kernels"]) == 18 and "engine-step-glm-image-9b-4096" in alone["others"]
