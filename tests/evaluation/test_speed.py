"""`mmaccel evaluate speed`: rows by hand, the words, prompts and seeds, and a whole run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel import TextToImage
from mmaccel.cli import main
from mmaccel.evaluation import transformers_baseline
from mmaccel.evaluation.speed import half_width, summarise_speed, take_turns
from mmaccel.pipelines.text_to_image.outputs import ImageOutput
from mmaccel.results import Stats
from tests.fixtures.tiny_model import N_TOKENS

KEYS = {  # of a row in the file, which other programs read
    *("side", "batch_size", "runs", "seconds", "first_seconds", "captures", "speed_up", "pairs"),
    *("pictures_per_second", "tokens_per_second", "passes", "row_passes", "prefill_passes"),
    *("draft_passes", "tokens_per_pass", "histogram", "stages", "peak_bytes"),
    *("loses_to", "loses"),
}
FASTER = dict(passes=8, row_passes=14, accepted=[4, 6, 4])
RUNS = 3  # fewer than the command allows, so that the test is fast


def run(side: str, index: int, seconds: float, **others: Any) -> dict[str, Any]:
    facts: dict[str, Any] = dict(
        batch_size=2, place=0, forward_seconds=0.5 * seconds, sampler_seconds=0.25 * seconds,
        pixel_seconds=0.125 * seconds, tokens=32, passes=16, row_passes=32, prefill_passes=1,
        draft_passes=0, accepted=[32], peak_bytes=100 + index, captures=0,
    )  # fmt: skip
    return {"side": side, "index": index, "seconds": seconds, **facts, **others}


def test_rows_by_hand() -> None:
    runs = [run("plain", k, s) for k, s in enumerate((4.0, 2.0, 6.0, 8.0, 10.0))]
    runs += [run("policy", k, s, **FASTER) for k, s in enumerate((2.0, 4.0, 3.0, 1.0, 5.0))]
    runs += [run("compiled", -1, 90.0, captures=1), run("compiled", 0, 1.0)]
    plain, policy, compiled = summarise_speed(runs)
    assert set(policy) == KEYS
    assert (plain["runs"], plain["speed_up"], plain["loses"]) == (5, 1.0, False)
    assert policy["pictures_per_second"] == pytest.approx(2 / 3)
    assert policy["tokens_per_second"] == pytest.approx(32 / 3)
    assert policy["tokens_per_pass"] == pytest.approx(32 / 14)
    assert (policy["passes"], policy["row_passes"]) == (8, 7)
    assert policy["histogram"] == [20, 30, 20] and plain["histogram"] == [160]
    stages = {"forward": 1.5, "sampler": 0.75, "pixel": 0.375, "other": 0.375}
    assert policy["stages"] == pytest.approx(stages) and policy["peak_bytes"] == 104
    assert compiled["first_seconds"] == 90.0 and compiled["captures"] == 0
    assert policy["loses_to"] == ["compiled"] and policy["loses"] and not compiled["loses"]


def test_prompts_are_taken_in_turn_and_warm_up_with_the_first() -> None:
    inputs = take_turns(["a", "b", "c"], 10, 2)
    assert [inputs(k) for k in (-1, 0, 1)] == [
        (["a", "b"], [10, 11]), (["a", "b"], [10, 11]), (["c", "a"], [12, 13]),
    ]  # fmt: skip


def test_interval_of_the_tokens_a_pass() -> None:
    passes = torch.tensor([50, 70] * 8)
    tokens = torch.zeros(16, 240, dtype=torch.long)
    stats = Stats(tokens=16 * 240, row_passes=int(passes.sum()))
    made = ImageOutput([], tokens, passes, stats, ["a"] * 16)
    spread = 10 * (16 / 15) ** 0.5  # standard deviation of the passes
    assert half_width(made) == pytest.approx(4 * 1.96 * spread / 60 / 4)
    few = ImageOutput([], tokens[:9], passes[:9], stats, ["a"] * 9)
    assert half_width(few) is None


def evaluate(folder: Path, out: Path, *more: object) -> int:
    policy = ("--policy", "jacobi", "--set", "window=4", "--warm-up", 1, "--runs", RUNS)
    return main(["evaluate", "speed", str(folder), "--out", *map(str, (out, *policy, *more))])


@pytest.fixture(autouse=True)
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmaccel.evaluation.speed.LEAST_RUNS", RUNS)


@pytest.mark.slow
def test_the_report_and_all_runs(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    # graphs are traced, and run as they are: the same shapes and counts in a second
    monkeypatch.setattr(transformers_baseline, "BACKEND", "eager")
    out = tmp_path / "speed"
    more = ("--batch-sizes", "1,2", "--baseline", "compiled")
    assert evaluate(tiny_folder, out, *more) == 0
    assert {f.name for f in out.iterdir()} == {"speed.json", "speed.jsonl"}
    report = json.loads((out / "speed.json").read_text())
    lines = [json.loads(line) for line in (out / "speed.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * 3 * (RUNS + 1) and sum(x["index"] < 0 for x in lines) == 6
    first = [x for x in lines if x["side"] == "compiled" and x["index"] < 0]
    assert [x["captures"] > 0 for x in first] == [True, True]
    assert report["baselines"] == ["compiled"] and report["left_out"] == {}
    assert [(r["batch_size"], r["side"]) for r in report["rows"]] == [
        (size, side) for size in (1, 2) for side in ("plain", "policy", "compiled")
    ]
    for row in report["rows"]:
        assert row["first_seconds"] > 0 and row["captures"] == 0  # all was compiled before
        if row["side"] == "policy":
            assert 1 < row["tokens_per_pass"] <= 4 and row["passes"] < N_TOKENS
            made = sum((k + 1) * n for k, n in enumerate(row["histogram"]))
            assert made == RUNS * N_TOKENS * row["batch_size"]
        else:
            assert row["passes"] == N_TOKENS and row["tokens_per_pass"] == 1
    said = " ".join(capsys.readouterr().out.split())
    loses = any(row["loses"] for row in report["rows"])
    assert ("loses at none" in said) != loses and "exactness: bitwise" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried much"), 1, "memory for a batch of 4"),
        (KeyboardInterrupt(), 130, "stopped; measured 1 of 3 batch sizes"),
    ],
    ids=["memory", "interrupt"],
)
def test_sizes_that_were_measured_are_saved(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any,
    error: BaseException, code: int, words: str,
) -> None:  # fmt: skip
    stream, runs = TextToImage.stream, list[int]()

    def failing(self: Any, captions: Any, *arguments: Any, **options: Any) -> Any:
        runs.append(len(captions))
        if runs.count(4) == 5:
            raise error
        return stream(self, captions, *arguments, **options)

    monkeypatch.setattr(TextToImage, "stream", failing)
    out = tmp_path / "s"
    assert evaluate(tiny_folder, out, "--batch-sizes", "1,4,2") == code
    assert words in capsys.readouterr().err
    report = json.loads((out / "speed.json").read_text())
    assert [row["batch_size"] for row in report["rows"]] == [1, 1]
    assert report["sizes_done"] == [1] and report["sizes_asked"] == [1, 4, 2]
    sizes = [json.loads(x)["batch_size"] for x in (out / "speed.jsonl").read_text().splitlines()]
    assert sizes.count(4) == 4
