"""The check on GPUs without one: parts, resuming, the budget, failures, cases on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.parts import CheckError, Part, Report, failed_parts, run_parts
from benchmarks.gpu.timing import TIMINGS, timing_parts
from benchmarks.report import FIGURES, fill_tables
from mmaccel.errors import OptionError
from mmaccel.kernels.dispatch import KERNELS
from tests.architecture.source import ROOT
from tests.kernels.case import FLOATS, Case, Lane
from tests.kernels.gpu_cases import run_cases

CPU = torch.device("cpu")
FACTS = {"device": "A GPU", "versions": {"torch": "2"}, "sources": "x", "commit": "c"}
FACTS |= {"command": "python"}


class Bench:
    """Parts a, b and c that count their runs; a clock that moves ten seconds with each."""

    def __init__(self, file: Path) -> None:
        self.file, self.runs, self.seconds = file, "", 0.0
        self.error: Exception | None = None

    def part(self, name: str) -> Part:
        def run(device: torch.device) -> dict[str, Any]:
            self.runs += name
            self.seconds += 10
            if name == "b" and self.error is not None:
                raise self.error
            return {"figures": {"product": 3.0}}

        return Part(name, run)

    def run(self, facts: dict[str, Any] | None = None, **options: Any) -> Report:
        three = [self.part(name) for name in "abc"]
        clock = {"clock": lambda: self.seconds}
        made = run_parts(three, self.file, facts or FACTS, CPU, **clock, **options)
        assert json.loads(self.file.read_text(encoding="utf-8")) == made
        return made


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "new" / "gpu-a.json")


def test_parts_run_once_for_the_same_device_versions_and_sources(bench: Bench) -> None:
    report = bench.run()
    assert bench.runs == "abc" and report["left"] == [] and report["device"] == "A GPU"
    assert report["parts"]["a"]["status"] == "passed" and report["parts"]["a"]["seconds"] == 10
    bench.run()
    assert bench.runs == "abc"
    bench.run(again=True)
    assert bench.runs == "abcabc"
    for key, value in (("device", "B"), ("versions", {"torch": "3"}), ("sources", "y")):
        bench.runs = ""
        bench.run({**FACTS, key: value})
        assert bench.runs == "abc"
        bench.run()  # back to the first facts


def test_one_part_alone(bench: Bench) -> None:
    report = bench.run(only=["b"])
    assert bench.runs == "b" and report["left"] == ["a", "c"]
    bench.run()
    assert bench.runs == "bac"
    with pytest.raises(OptionError, match="part: expected one of a, b, c, received 'd'"):
        bench.run(only=["d"])


def test_the_budget_leaves_the_rest_and_says_so(bench: Bench) -> None:
    assert bench.run(budget=15)["left"] == ["c"]
    assert bench.runs == "ab"
    assert bench.run(budget=0)["left"] == [] and bench.runs == "abc"  # the first always runs
    assert bench.run(budget=0, again=True)["left"] == ["b", "c"]
    assert bench.run({**FACTS, "sources": "y"}, budget=0)["left"] == ["b", "c"]


def test_a_failure_is_saved_and_the_others_run(bench: Bench) -> None:
    bench.error = AssertionError("3 is not 4")
    report = bench.run()
    assert bench.runs == "abc" and failed_parts(report) == ["b"] and report["left"] == []
    assert report["parts"]["b"]["message"] == "AssertionError: 3 is not 4"
    bench.error = None
    assert failed_parts(bench.run()) == [] and bench.runs == "abcb"


def test_an_error_that_ends_a_call_does_not_skip_parts(bench: Bench) -> None:
    """An error of the device in b, twice: c is run by the second call, and then b."""
    bench.error = RuntimeError("CUDA error: an illegal memory access")
    bench.error.add_note("in large, bfloat16")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal"):
            bench.run()
    assert bench.runs == "abcb"
    report = json.loads(bench.file.read_text(encoding="utf-8"))
    assert report["left"] == [] and failed_parts(report) == ["b"]
    assert report["parts"]["b"]["message"].endswith("access; in large, bfloat16")


def test_a_part_that_kills_the_process_is_in_the_report(bench: Bench) -> None:
    class Killed(BaseException):
        pass

    bench.error = Killed()  # type: ignore[assignment]
    with pytest.raises(Killed):
        bench.run()
    report = json.loads(bench.file.read_text(encoding="utf-8"))
    assert report["parts"]["b"]["message"] == "it began and did not end"
    assert report["left"] == ["c"] and failed_parts(report) == ["b"]
    bench.error = None
    assert failed_parts(bench.run()) == [] and bench.runs == "abcb"


def test_a_part_that_failed_holds_no_memory_while_the_next_runs(tmp_path: Path) -> None:
    held: list[Any] = []

    def fail(device: torch.device) -> dict[str, Any]:
        model = torch.nn.Linear(1, 1)
        held.append(weakref.ref(model))
        raise ValueError("no such shape")

    def measure(device: torch.device) -> dict[str, Any]:
        return {"alive": held[0]() is not None}

    both = [Part("fail", fail), Part("measure", measure)]
    report = run_parts(both, tmp_path / "gpu-a.json", FACTS, CPU)
    assert report["parts"]["measure"]["alive"] is False


def test_the_report_is_replaced_whole(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.run(only=["a"])

    def refuse(*names: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("os.replace", refuse)
    before = bench.file.read_text(encoding="utf-8")
    with pytest.raises(OSError, match="full"):
        bench.run(only=["c"])
    assert bench.file.read_text(encoding="utf-8") == before


def test_cases_run_on_a_cpu_and_failures_are_named() -> None:
    seen: list[tuple[str, torch.dtype]] = []

    def check(name: str) -> Case:
        def run(lane: Lane) -> None:
            seen.append((name, lane.dtype))
            assert name != "bad" or lane.dtype == torch.float32, "they part"

        return Case(name, run, large=name == "large")

    found = run_cases([check("good"), check("large")], CPU)
    assert found == {"passed": 2} and seen == [("good", FLOATS[0]), ("good", FLOATS[1])]
    with pytest.raises(CheckError, match="1 of 4 cases failed: bad, float16") as caught:
        run_cases([check("bad"), check("good")], CPU)
    assert caught.value.found["passed"] == 3
    message = caught.value.found["failed"]["bad, float16"]
    assert message.startswith("AssertionError: they part") and "(run, line " in message


def test_what_failed_in_cases_is_in_the_report(bench: Bench) -> None:
    bench.error = CheckError("1 of 4", {"passed": 3, "failed": {"x": "y"}})
    part = bench.run()["parts"]["b"]
    assert (
        part["status"] == "failed" and part["failed"] == {"x": "y"} and part["message"] == "1 of 4"
    )


def test_a_lost_device_ends_the_cases() -> None:
    def lose(lane: Lane) -> None:
        raise RuntimeError("CUDA error: launch failure")

    with pytest.raises(RuntimeError, match="launch failure") as caught:
        run_cases([Case("lost", lose)], CPU)
    assert caught.value.__notes__ == ["in lost, float32"]


def test_timings_stand_for_kernels_that_exist() -> None:
    assert set(TIMINGS) <= set(KERNELS)
    names = [part.name for part in timing_parts([*KERNELS, "of-a-colleague"])]
    assert names == ["copy", *(f"time-{kernel}" for kernel in KERNELS if kernel in TIMINGS)]
    keys = [timing.figure for rows in TIMINGS.values() for timing in rows if timing.figure]
    assert set(keys) <= set(FIGURES)


def test_tables_take_the_newest_figure_of_a_device() -> None:
    def report(device: str, date: str, product: float, status: str = "passed") -> Report:
        row = {"kernel": "noise", "name": "large", "torch_ms": 9.0, "triton_ms": 1 / 8}
        row |= {"gb_per_s": 4000.4, "share_of_copy": 0.815}
        part = {"status": status, "date": date, "figures": {"product": product}, "timings": [row]}
        return {**FACTS, "device": device, "date": date, "parts": {"p": part}}

    reports = {
        "gpu-a": report("A", "2026-02-02T00", 7.0),
        "gpu-a-old": report("A", "2026-01-01T00", 5.0),
        "gpu-b": report("B", "2026-03-03T00", 1.0, "failed"),
    }
    marks = "<!-- table: gpu-figures -->\n<!-- end -->\n<!-- table: gpu-kernels -->\n<!-- end -->"
    filled = fill_tables(marks, reports)
    assert "| figure | target | A | B |" in filled
    assert "| 7.00× | not yet measured |" in filled and "5.00×" not in filled
    assert filled.count("| `noise` | large | 9.000 | 0.125 | 4000 | 82 % |") == 1
    assert "2026-02-02, by `python`" in filled
    empty = fill_tables(marks, {})
    assert empty.count("| not yet measured |") == len(FIGURES) and "Not yet measured." in empty
    assert "python scripts/gpu_check.py" in empty


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens where there is no GPU")
def test_without_a_gpu_one_line_and_nothing_written(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts" / "gpu_check.py", "--out", tmp_path / "r"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr == "" and not (tmp_path / "r").exists()
    (line,) = done.stdout.splitlines()
    assert "expected a GPU" in line and "nothing was written" in line


def test_the_script_needs_few_packages() -> None:
    program = (
        "import sys, runpy; runpy.run_path(sys.argv[1], run_name='x'); "
        "print(*[n for n in ('typer', 'rich', 'transformers', 'PIL', 'pytest', 'diffusers', "
        "'einops', 'safetensors') if n in sys.modules])"
    )
    command = [sys.executable, "-c", program, str(ROOT / "scripts" / "gpu_check.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
