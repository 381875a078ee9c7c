"""A job over an executor that fails on purpose: which items are retried, which are recorded."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel.batch.job import ItemsFailed, Job, Outcome
from mmaccel.batch.manifest import Manifest, Record, WriteError
from mmaccel.batch.prompts import Item, Row, make_items

N = 10


class Executor:
    """Finishes items in order, `rows` at a time; items in `failures` fail so many times first."""

    def __init__(self, rows: int, failures: dict[int, int], error: type[Exception]) -> None:
        self.rows, self.failures, self.error = rows, dict(failures), error
        self.calls: list[list[int]] = []

    def run_all(
        self, items: Sequence[Item], on_finish: Callable[[Record], None], rows: int | None = None
    ) -> None:
        rows = self.rows if rows is None else rows
        self.calls.append([item.k for item in items])
        for first in range(0, len(items), rows):
            batch = items[first : first + rows]
            for item in batch:
                if self.failures.get(item.k, 0):
                    self.failures[item.k] -= 1
                    raise ItemsFailed(batch, self.error("boom")) from self.error("boom")
            for item in batch:
                on_finish({"id": item.row.id, "k": item.k, "status": "ok"})


class Recorder:
    """Records all events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def finished(self, record: Record) -> None:
        self.events.append(("finished", record["k"]))

    def failed(self, record: Record) -> None:
        self.events.append(("failed", record["k"]))

    def note(self, text: str) -> None:
        self.events.append(("note", text))


def run(
    folder: Path, executor: Any, retries: int = 1, most: int | None = None,
    negative: str | None = None,
) -> tuple[Outcome, list[Record], Recorder]:  # fmt: skip
    items = make_items([Row("a", "x", negative, n=N)], 0)
    reporter, manifest = Recorder(), Manifest(folder / "manifest.jsonl")
    job = Job(items, {item.key: "r" for item in items}, manifest, reporter, retries, most)
    try:
        outcome = job.run(executor)
    finally:
        manifest.close()
        lines = (folder / "manifest.jsonl").read_text().splitlines()
    return outcome, list(map(json.loads, lines)), reporter


def test_every_item_is_written_down_once(tmp_path: Path) -> None:
    outcome, lines, reporter = run(tmp_path, Executor(4, {}, RuntimeError))
    assert (outcome.finished, outcome.failed) == (N, 0)
    assert [line["k"] for line in lines] == [k for _, k in reporter.events] == list(range(N))


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_one_failed_item_ends_no_job(tmp_path: Path, retries: int) -> None:
    executor = Executor(4, {5: 99}, RuntimeError)
    outcome, lines, reporter = run(tmp_path, executor, retries)
    assert (outcome.finished, outcome.failed, outcome.is_cut) == (N - 1, 1, False)
    assert sorted(line["k"] for line in lines) == list(range(N))
    (bad,) = [line for line in lines if line["status"] == "failed"]
    assert (bad["k"], bad["error"], bad["prompt"]) == (5, "RuntimeError: boom", "x")
    assert ("failed", 5) in reporter.events
    # 4..7 were made together: each is tried alone, 5 once more for every retry, and 8, 9 follow
    alone = [[4], *[[5]] * (1 + retries), [6], [7]]
    assert executor.calls == [list(range(N)), *alone, [8, 9]]


@pytest.mark.parametrize("negative", [None, "", "blurred"])
def test_a_failed_record_has_the_negative_prompt(tmp_path: Path, negative: str | None) -> None:
    _, lines, _ = run(tmp_path, Executor(4, {5: 99}, RuntimeError), 0, negative=negative)
    (bad,) = [line for line in lines if line["status"] == "failed"]
    assert bad.get("negative") == (negative or None)


def test_an_item_that_failed_alone_has_one_try_less(tmp_path: Path) -> None:
    executor = Executor(1, {5: 99}, RuntimeError)
    outcome, _, _ = run(tmp_path, executor, 2)
    assert (
        outcome.failed == 1
        and executor.calls[1:3] == [[5], [5]]
        and executor.calls[3] == [6, 7, 8, 9]
    )


def test_a_job_ends_when_too_many_fail(tmp_path: Path) -> None:
    everything = dict.fromkeys(range(N), 99)
    outcome, lines, _ = run(tmp_path, Executor(3, everything, RuntimeError), 0, 1)
    assert outcome.is_cut and outcome.failed == 2 and len(lines) == 2
    other = tmp_path / "other"
    other.mkdir()
    outcome, lines, _ = run(other, Executor(3, everything, RuntimeError), 0, None)
    assert not outcome.is_cut and outcome.failed == N == len(lines)


def test_too_little_memory_makes_smaller_batches(tmp_path: Path) -> None:
    class Small(Executor):
        def run_all(
            self,
            items: Sequence[Item],
            on_finish: Callable[[Record], None],
            rows: int | None = None,
        ) -> None:
            rows = self.rows if rows is None else rows
            if min(rows, len(items)) > 2:
                self.calls.append([rows])
                raise ItemsFailed(items[:rows], RuntimeError()) from torch.OutOfMemoryError("no")
            super().run_all(items, on_finish, rows)

    executor = Small(8, {}, RuntimeError)
    outcome, _, reporter = run(tmp_path, executor)
    assert (outcome.finished, outcome.failed) == (N, 0)
    assert executor.calls == [[8], [4], list(range(N))]
    assert [text for event, text in reporter.events if event == "note"] == [
        "out of memory with 8 images at once, continuing with 4",
        "out of memory with 4 images at once, continuing with 2",
    ]


def test_too_little_memory_everywhere_ends(tmp_path: Path) -> None:
    class Actors:
        """Two of them, each out of memory with any batch, and with image 3 alone too."""

        def __init__(self) -> None:
            self.rows: list[int | None] = []

        def run_all(
            self,
            items: Sequence[Item],
            on_finish: Callable[[Record], None],
            rows: int | None = None,
        ) -> None:
            if len(items) > 1 or items[0].k == 3:
                self.rows.append(rows)
                assert len(self.rows) < 50, "expected smaller batches, and then each alone"
                at_hand = items[: 2 * (4 if rows is None else rows)]
                raise ItemsFailed(at_hand, MemoryError()) from MemoryError()
            on_finish({"id": "a", "k": items[0].k, "status": "ok"})

    actors = Actors()
    outcome, _, _ = run(tmp_path, actors)
    assert (outcome.finished, outcome.failed) == (N - 1, 1)
    assert actors.rows[:4] == [None, 4, 2, 1]


def test_a_full_disk_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = Manifest.append

    def full(self: Manifest, record: Record) -> None:
        if record["k"] == 3:
            raise OSError(28, "No space left on device")
        append(self, record)

    monkeypatch.setattr(Manifest, "append", full)
    with pytest.raises(WriteError, match="No space left on device; its records are complete"):
        run(tmp_path, Executor(1, {}, RuntimeError))
    lines = (tmp_path / "manifest.jsonl").read_text().splitlines()
    assert [json.loads(line)["k"] for line in lines] == [0, 1, 2]
