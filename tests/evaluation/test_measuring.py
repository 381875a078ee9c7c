"""The one measure: turns, warm-up, rounds that are done, and what the rows say of the runs."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from mmaccel.evaluation import measure as measuring
from mmaccel.evaluation.measure import Case, by_case, measure, summarise, tabulate
from tests.architecture.source import ROOT


def run_of(side: str, index: int, seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "side": side, "index": index, "place": 0, "seconds": seconds, "peak_bytes": None, **more
    }  # fmt: skip


def test_cases_change_places_and_see_the_inputs_of_their_round() -> None:
    cases = [Case(name, lambda x: {"x": x}, inputs=lambda k: 10 * k) for name in "abc"]
    runs = list(measure(cases, 6, warm_up=1))
    assert [run["x"] for run in runs] == [10 * k for k in range(-1, 6) for _ in cases]
    rounds = ["".join(run["side"] for run in runs[3 * k : 3 * k + 3]) for k in range(7)]
    assert rounds[1:] == ["abc", "bca", "cab", "cba", "acb", "bac"]  # all orders, none twice
    assert {name: len(own) for name, own in by_case(runs).items()} == {"a": 6, "b": 6, "c": 6}


def test_rounds_that_are_done_are_left_out() -> None:
    cases = [Case(name, lambda _: None) for name in "ab"]
    runs = list(measure(cases, 3, warm_up=0, done={"a": 2, "b": 1}))
    assert sorted((run["side"], run["index"]) for run in runs) == [("a", 2), ("b", 1), ("b", 2)]


def test_the_device_is_waited_for_on_both_sides_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(measuring, "synchronise", lambda device: said.append(device.type))
    (run,) = measure([Case("a", lambda _: said.append("run"))], 1, warm_up=0)
    assert said == ["cpu", "run", "cpu"] and run["seconds"] > 0
    (run,) = measure([Case("a", lambda _: {"seconds": 3.0})], 1, warm_up=0)
    assert run["seconds"] == 3.0  # of its own stopwatch


def test_rows_compare_medians_and_pairs() -> None:
    slow = [run_of("slow", k, s) for k, s in enumerate([2.0, 4.0, 6.0, 8.0])]
    fast = [run_of("fast", k, s, peak_bytes=k) for k, s in enumerate([1.0, 1.0, 2.0, 8.0])]
    first, second = summarise([run_of("fast", -1, 9.0), *slow, *fast])
    assert first["side"] == "slow" and first["speed_up"] == 1 and first["first_seconds"] is None
    assert second["seconds"]["median"] == 1.5 and second["seconds"]["iqr"] == 3.5 - 1.0
    assert second["speed_up"] == 5 / 1.5
    assert second["pairs"] == {"median": 2.5, "quartiles": [1.75, 3.25]}  # of 2, 4, 3 and 1
    assert second["first_seconds"] == 9.0 and second["peak_bytes"] == 3 and second["runs"] == 4
    assert [row["speed_up"] for row in summarise([*slow, *fast], "fast")] == [1.5 / 5, 1.0]


MEMORY = """
import torch
from mmaccel.evaluation.measure import Case, measure

cases = [Case(str(n), lambda _, n=n: {"n": len(torch.ones(n))}) for n in (1, 2**26, 2)]
print(*(run["peak_bytes"] for run in measure(cases, 1, warm_up=0)))
"""


@pytest.mark.slow
def test_memory_is_that_of_a_run() -> None:
    """In a process of its own: what others left free in this one would be taken first."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    before, high, after = done.stdout.split()
    if before == "None":
        pytest.skip("this system does not report a process's largest memory")
    assert int(high) - int(before) > 200 * 2**20 and int(high) - int(after) > 200 * 2**20


def test_a_dash_stands_for_a_number_that_is_not_known_and_for_no_fault() -> None:
    columns = {"a": "{a:.1f} x", "b": "{b[c]:.0%}"}
    assert tabulate(columns, [{"a": 2, "b": {"c": 0.5}}, {"a": None, "b": {"c": None}}]) == [
        ("2.0 x", "50%"),
        ("-", "-"),
    ]
    with pytest.raises(TypeError):
        tabulate({"a": lambda row: row["a"] + 1}, [{"a": "text"}])
