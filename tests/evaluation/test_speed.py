"""Throughput: rows by hand, the order of runs, the report's words, memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmaccel.evaluation.speed.measure import Run, Side, measure, order_of, repeat_batches
from mmaccel.evaluation.speed.report import write_speed
from mmaccel.evaluation.speed.rows import summarise
from mmaccel.results import Stats
from mmaccel.samplers.sampling_params import SamplingParams
from tests.architecture.source import ROOT


def run(side: str, index: int, seconds: float, **others: Any) -> Run:
    facts: dict[str, Any] = dict(
        batch_size=2, place=0, forward_seconds=0.5 * seconds, sampler_seconds=0.25 * seconds,
        pixel_seconds=0.125 * seconds, other_seconds=0.125 * seconds, tokens=32, passes=16,
        row_passes=32, prefill_passes=1, draft_passes=0, accepted=[32], peak_bytes=100 + index,
        slots=None,
    )  # fmt: skip
    return Run(side=side, index=index, seconds=seconds, **(facts | others))


KEYS = {  # of a row in the file, which other programs read
    *("side", "batch_size", "runs", "seconds", "first_seconds", "captures", "speed_up", "pairs"),
    *("pictures_per_second", "tokens_per_second", "passes", "row_passes", "prefill_passes"),
    *("draft_passes", "tokens_per_pass", "unused", "histogram", "stages", "peak_bytes"),
    *("loses_to", "loses"),
}
FASTER = dict(passes=8, row_passes=14, accepted=[4, 6, 4], slots=14 * 4)


def make_runs() -> list[Run]:
    plain = [run("plain", k, s) for k, s in enumerate((4.0, 2.0, 6.0, 8.0, 10.0))]
    policy = [run("policy", k, s, **FASTER) for k, s in enumerate((2.0, 4.0, 3.0, 1.0, 5.0))]
    return [r for pair in zip(plain, policy) for r in pair]


def test_rows_by_hand() -> None:
    plain, policy = summarise(make_runs())
    # sorted: 2 4 6 8 10; p90 stands 0.6 of the way from the fourth to the fifth
    assert plain["seconds"] == pytest.approx({"median": 6, "p90": 9.2, "p99": 9.92, "iqr": 4})
    assert (plain["runs"], plain["speed_up"], plain["loses"]) == (5, 1.0, False)
    assert policy["seconds"]["median"] == 3 and policy["speed_up"] == 2.0
    assert policy["pairs"]["median"] == 2.0  # of 2, 0.5, 2, 8, 2
    assert policy["pairs"]["quartiles"] == [2.0, 2.0]
    assert policy["pictures_per_second"] == pytest.approx(2 / 3)
    assert policy["tokens_per_second"] == pytest.approx(32 / 3)
    assert policy["tokens_per_pass"] == pytest.approx(32 / 14)
    assert (policy["passes"], policy["row_passes"]) == (8, 7)
    assert policy["histogram"] == [20, 30, 20] and plain["histogram"] == [160]
    assert policy["unused"] == pytest.approx(1 - 32 / 56) and plain["unused"] is None
    assert policy["stages"]["forward"] == pytest.approx(1.5)
    assert policy["stages"]["sampler"] == pytest.approx(0.75)
    assert policy["peak_bytes"] == 104
    assert set(policy) == KEYS


def test_a_slower_policy_loses() -> None:
    slow = [run("plain", 0, 1.0), run("policy", 0, 2.0, batch_size=2)]
    wide = [run("plain", 0, 3.0, batch_size=4), run("policy", 0, 2.0, batch_size=4)]
    rows = summarise([*slow, *wide])
    assert [(r["batch_size"], r["side"], r["loses"]) for r in rows] == [
        (2, "plain", False),
        (2, "policy", True),
        (4, "plain", False),
        (4, "policy", False),
    ]
    machine = {"name": "CPU", "device": "cpu", "threads": 1, "versions": {"torch": "2"}}
    report = {"policy": "J()", "model": "m", "machine": machine, "dtype": "float32"}
    report |= {"guidance": 1.0, "temperature": 1.0, "seed": 0, "promise": "bitwise", "runs": 1}
    report |= {"warm_up": 1, "command": "mmaccel evaluate speed", "rows": rows}
    report |= {"baselines": [], "left_out": {"compiled": "there is no compiler"}}
    text = write_speed(json.loads(json.dumps(report)))
    assert "It loses at batch 2 (to plain)." in text and "| 2 | policy | 2.0000 |" in text
    # seconds of the policy and the plain loop: 2 and 1, then 2 and 3
    assert "batch 2: 0.50 times as fast as plain; batch 4: 1.50 times as fast as plain." in text
    assert "Left out: compiled, as there is no compiler." in text
    assert "No baseline of another library was measured" in text
    assert "| 4 | policy | 1.0000 | 0.5000 | 0.2500 | 0.2500 |" in text  # stages of 2 seconds


def test_sides_alternate_and_share_prompts_and_seeds() -> None:
    calls: list[tuple[Any, ...]] = []
    waits: list[int] = []

    def stream(texts: list[str], params: Any, *, policy: Any, seed: Any, batch_size: int) -> Any:
        calls.append((policy, tuple(texts), tuple(seed)))
        assert len(waits) % 2 == 1  # the device was waited for once before each run
        stats = Stats(tokens=4, passes=2, row_passes=4, accepted=[4], seconds=0.0)
        return [SimpleNamespace(stats=stats)]

    pipe = SimpleNamespace(stream=stream, model=SimpleNamespace(device=torch.device("cpu")))
    sides = [
        Side("plain", pipe, "P", SamplingParams()),
        Side("policy", pipe, "Q", SamplingParams()),
    ]
    made = []
    for size in (2, 1):
        batches = repeat_batches(["a", "b", "c"], 10, size, rounds=3, warm_up=1)
        made += [each.run for each in measure(sides, batches, lambda: waits.append(1))]
    assert [(r.batch_size, r.side, r.index, r.place) for r in made[:8]] == [
        (2, "policy", -1, 0),
        (2, "plain", -1, 1),
        (2, "plain", 0, 0),
        (2, "policy", 0, 1),
        (2, "policy", 1, 0),
        (2, "plain", 1, 1),
        (2, "plain", 2, 0),
        (2, "policy", 2, 1),
    ]
    assert len(made) == 16 and len(calls) == 16 and len(waits) == 32  # the first two warm up
    assert calls[2] == ("P", ("a", "b"), (10, 11)) and calls[3] == ("Q", ("a", "b"), (10, 11))
    assert calls[4] == ("Q", ("c", "a"), (12, 13))
    assert made[0].seconds == pytest.approx(made[0].other_seconds)


def test_a_round_of_several_sides() -> None:
    """Each side begins as often as any, none has the same one before it always."""
    sides = ["a", "b", "c"]
    rounds = [order_of(sides, k) for k in range(-6, 6)]
    assert rounds[6:9] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    assert rounds[9:] == [["c", "b", "a"], ["a", "c", "b"], ["b", "a", "c"]]
    for place in range(3):
        assert sorted(order[place] for order in rounds) == sorted(sides * 4)
    pairs = [pair for order in rounds for pair in zip(order, order[1:])]
    assert {pairs.count((a, b)) for a in sides for b in sides if a != b} == {4}
    assert [order_of(["a", "b"], k) for k in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_runs_to_warm_up_count_for_the_first_alone_and_the_fastest_side_is_named() -> None:
    warm = [run("plain", -1, 5.0), run("policy", -1, 6.0, captures=2)]
    warm += [run("compiled", -2, 90.0, captures=1), run("compiled", -1, 1.0)]
    runs = [*warm, run("plain", 0, 4.0), run("policy", 0, 2.0), run("compiled", 0, 1.0)]
    runs += [run("static", 0, 1.5)]
    rows = {row["side"]: row for row in summarise(runs)}
    assert list(rows) == ["plain", "policy", "compiled", "static"]
    assert rows["compiled"]["first_seconds"] == 90.0 and rows["compiled"]["captures"] == 0
    assert rows["compiled"]["seconds"]["median"] == 1.0 and rows["compiled"]["speed_up"] == 4.0
    assert rows["static"]["first_seconds"] is None and rows["plain"]["runs"] == 1
    assert rows["policy"]["loses_to"] == ["compiled", "static"] and rows["policy"]["loses"]
    assert not rows["static"]["loses"] and rows["policy"]["speed_up"] == 2.0


STRETCHES = """
import torch
from mmaccel.evaluation.speed.measure import read_peak, reset_peak

reset_peak("cpu")
found = [read_peak("cpu")]
block = torch.ones(2**26)  # 256 MiB
found.append(read_peak("cpu"))
del block
reset_peak("cpu")
print(*found, read_peak("cpu"))
"""


def test_the_peak_is_of_a_stretch() -> None:
    """In a process of its own: what others left free in this one would be taken first."""
    done = subprocess.run(
        [sys.executable, "-c", STRETCHES], capture_output=True, text=True, check=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    before, high, after = done.stdout.split()
    if before == "None":
        pytest.skip("this system does not report a process's largest memory")
    assert int(high) - int(before) > 200 * 2**20 and int(high) - int(after) > 200 * 2**20
