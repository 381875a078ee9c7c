"""A job over an executor that fails on purpose: which items are retried, which are recorded."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel.batch.job import Fingerprint, ItemsFailed, Job, Outcome
from mmaccel.batch.manifest import Manifest, Record, WriteError
from mmaccel.batch.prompts import Item, Row, make_items

N = 10
OnFinish = Callable[[Record], None]


class Executor:
    """Finishes items in order, `rows` at a time; items in `failures` fail so many times first.

    Attributes:
        calls: items of each call.
    """

    def __init__(self, rows: int, failures: dict[int, int] | None = None) -> None:
        self.rows, self.failures = rows, failures or {}
        self.calls: list[list[int]] = []

    def check(self, items: Sequence[Item]) -> Fingerprint:
        return lambda item: "r"

    def close(self) -> None:
        pass

    def run_all(self, items: Sequence[Item], on_finish: OnFinish, rows: int | None = None) -> None:
        rows = self.rows if rows is None else rows
        self.calls.append([item.k for item in items])
        for first in range(0, len(items), rows):
            batch = items[first : first + rows]
            for item in batch:
                if self.failures.get(item.k, 0):
                    self.failures[item.k] -= 1
                    error = RuntimeError("boom")
                    raise ItemsFailed(batch, error) from error
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
    folder: Path, executor: Executor, negative: str | None = None, **options: Any
) -> tuple[Outcome, list[Record], list[tuple[str, Any]]]:
    """The outcome, the manifest and the events of a job."""
    items = make_items([Row("a", "x", negative, n=N)], 0)
    reporter, manifest = Recorder(), Manifest(folder / "manifest.jsonl")
    try:
        outcome = Job(items, executor.check(items), manifest, reporter, **options).run(executor)
    finally:
        manifest.close()
    return outcome, read(folder), reporter.events


def read(folder: Path) -> list[Record]:
    return list(map(json.loads, (folder / "manifest.jsonl").read_text().splitlines()))


def test_every_item_is_written_down_once(tmp_path: Path) -> None:
    outcome, lines, events = run(tmp_path, Executor(4))
    assert (outcome.finished, outcome.failed) == (N, 0)
    assert [line["k"] for line in lines] == [k for _, k in events] == list(range(N))


@pytest.mark.parametrize(
    ("retries", "negative"), [(0, None), (1, ""), (3, "blurred")], ids=["0", "1", "3"]
)
def test_one_failed_item_ends_no_job(tmp_path: Path, retries: int, negative: str | None) -> None:
    executor = Executor(4, {5: 99})
    outcome, lines, events = run(tmp_path, executor, negative, retries=retries)
    assert (outcome.finished, outcome.failed, outcome.is_cut) == (N - 1, 1, False)
    assert sorted(line["k"] for line in lines) == list(range(N))
    (bad,) = [line for line in lines if line["status"] == "failed"]
    assert (bad["k"], bad["error"], bad["prompt"]) == (5, "RuntimeError: boom", "x")
    assert bad.get("negative") == (negative or None) and ("failed", 5) in events
    # 4..7 were made together: each is tried alone, 5 once more for every retry, and 8, 9 follow
    alone = [[4], *[[5]] * (1 + retries), [6], [7]]
    assert executor.calls == [list(range(N)), *alone, [8, 9]]


def test_an_item_that_failed_alone_has_one_try_less(tmp_path: Path) -> None:
    executor = Executor(1, {5: 99})
    outcome, _, _ = run(tmp_path, executor, retries=2)
    assert outcome.failed == 1 and executor.calls[1:] == [[5], [5], [6, 7, 8, 9]]


@pytest.mark.parametrize(("most", "n_failed"), [(1, 2), (None, N)])
def test_a_job_ends_when_too_many_fail(tmp_path: Path, most: int | None, n_failed: int) -> None:
    executor = Executor(3, dict.fromkeys(range(N), 99))
    outcome, lines, _ = run(tmp_path, executor, retries=0, max_failures=most)
    assert outcome.is_cut == (most is not None) and outcome.failed == len(lines) == n_failed


class Small(Executor):
    """Has memory for two."""

    def run_all(self, items: Sequence[Item], on_finish: OnFinish, rows: int | None = None) -> None:
        rows = self.rows if rows is None else rows
        if min(rows, len(items)) > 2:
            self.calls.append([rows])
            raise ItemsFailed(items[:rows], RuntimeError()) from torch.OutOfMemoryError("no")
        super().run_all(items, on_finish, rows)


def test_too_little_memory_makes_smaller_batches(tmp_path: Path) -> None:
    executor = Small(8)
    outcome, _, events = run(tmp_path, executor)
    assert (outcome.finished, outcome.failed) == (N, 0)
    assert executor.calls == [[8], [4], list(range(N))]
    assert [text for event, text in events if event == "note"] == [
        "out of memory with 8 images at once, continuing with 4",
        "out of memory with 4 images at once, continuing with 2",
    ]


class Actors(Executor):
    """Two of them, each out of memory with any batch, and with image 3 alone too."""

    def run_all(self, items: Sequence[Item], on_finish: OnFinish, rows: int | None = None) -> None:
        if len(items) > 1 or items[0].k == 3:
            self.calls.append([self.rows if rows is None else rows])
            assert len(self.calls) < 50, "expected smaller batches, and then each alone"
            raise ItemsFailed(items[: 2 * self.calls[-1][0]], MemoryError()) from MemoryError()
        on_finish({"id": "a", "k": items[0].k, "status": "ok"})


def test_too_little_memory_everywhere_ends(tmp_path: Path) -> None:
    actors = Actors(4)
    outcome, _, _ = run(tmp_path, actors)
    assert (outcome.finished, outcome.failed) == (N - 1, 1)
    assert actors.calls[:4] == [[4], [4], [2], [1]]


def test_a_full_disk_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = Manifest.append

    def full(self: Manifest, record: Record) -> None:
        if record["k"] == 3:
            raise OSError(28, "No space left on device")
        append(self, record)

    monkeypatch.setattr(Manifest, "append", full)
    with pytest.raises(WriteError, match="No space left on device; its records are complete"):
        run(tmp_path, Executor(1))
    assert [line["k"] for line in read(tmp_path)] == [0, 1, 2]
