"""A job over an executor that fails on purpose: which items are retried, which are recorded."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel.batch.job import Job
from mmaccel.batch.manifest import Manifest
from mmaccel.batch.prompts import Item, Row, make_items
from mmaccel.batch.worker import ItemsFailed

N = 10
Fails = Callable[[list[int]], bool]


class Executor:
    """Makes items in order, `rows` at a time; those that `fails` is true of raise `error`.

    Attributes:
        calls: items of each call.
    """

    def __init__(self, rows: int, fails: Fails, error: Exception) -> None:
        self.rows, self.fails, self.error = rows, fails, error
        self.calls: list[list[int]] = []

    def run_all(self, items: Sequence[Item], on_finish: Any, rows: int | None = None) -> None:
        rows = self.rows if rows is None else rows
        self.calls.append([item.k for item in items])
        for first in range(0, len(items), rows):
            batch = items[first : first + rows]
            if self.fails([item.k for item in batch]):
                raise ItemsFailed(batch, self.error) from self.error
            for item in batch:
                on_finish({"id": item.row.id, "k": item.k, "status": "ok"})


def run(folder: Path, rows: int, fails: Fails, error: Exception, **options: Any) -> Any:
    """The job, the manifest's records, the calls and the notes."""
    executor = Executor(rows, fails, error)
    items = make_items([Row("a", "x", "blurred", n=N)], 0)
    manifest, events = Manifest(folder / "manifest.jsonl"), list[Any]()
    job = Job(lambda item: "r", manifest, lambda *event: events.append(event), **options)
    job.run(items, executor)  # type: ignore[arg-type]
    manifest.close()
    lines = list(map(json.loads, manifest.file.read_text().splitlines()))
    return job, lines, executor.calls, [content for name, content in events if name == "note"]


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_one_failed_item_ends_no_job(tmp_path: Path, retries: int) -> None:
    boom = RuntimeError("boom")
    job, lines, calls, _ = run(tmp_path, 4, lambda batch: 5 in batch, boom, retries=retries)
    assert (job.finished, job.failed, job.is_cut) == (N - 1, {("a", 5)}, False)
    assert sorted(line["k"] for line in lines) == list(range(N))
    (failed,) = [line for line in lines if line["status"] == "failed"]
    assert (failed["k"], failed["error"], failed["negative"]) == (
        5,
        "RuntimeError: boom",
        "blurred",
    )
    # 4..7 were made together: each is tried alone, 5 once more for every retry, and 8, 9 follow
    assert calls == [list(range(N)), [4], *[[5]] * (1 + retries), [6], [7], [8, 9]]


@pytest.mark.parametrize(("most", "n_failed"), [(1, 2), (None, N)])
def test_a_job_ends_when_too_many_fail(tmp_path: Path, most: int | None, n_failed: int) -> None:
    options = {"retries": 0, "max_failures": most}
    job, lines, _, _ = run(tmp_path, 3, lambda batch: True, RuntimeError(), **options)
    assert job.is_cut == (most is not None) and len(job.failed) == len(lines) == n_failed


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"), MemoryError()])
@pytest.mark.parametrize(("room", "failed"), [(2, set()), (1, {("a", 3)})])
def test_too_little_memory_makes_smaller_batches(
    tmp_path: Path, error: Exception, room: int, failed: set[Any]
) -> None:
    """Item 3 has too little alone too, where there is room for one."""
    few = lambda batch: len(batch) > room or (room == 1 and batch == [3])  # noqa: E731
    job, _, _, notes = run(tmp_path, 4 * room, few, error)
    assert job.failed == failed and job.finished == N - len(failed)
    sizes = (4 * room, 2 * room)
    assert notes == [f"out of memory with {n} at once, continuing with {n // 2}" for n in sizes]
