"""A job: makes the items that are missing, tries failed ones again alone, and records each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmaccel.batch.manifest import (
    JOB_SEED,
    Key,
    Manifest,
    Past,
    Record,
    is_complete,
    names_of,
)
from mmaccel.batch.prompts import Item
from mmaccel.batch.worker import Fingerprint, ItemsFailed, Worker
from mmaccel.errors import OptionError

_TEMPORARY = re.compile(r"\.(?P<file>.+\.\w+)\.\d+\.tmp")  # of `write_whole`


@dataclass
class Job:
    """The items of one process.

    Attributes:
        manifest: receives a record of every item.
        report: called with an event, "item", "failed" or "note", and its record or text.
        retries: how often a failed item is tried again, alone.
        max_failures: the job ends when more items than this failed; None never ends it.
        left, failed: items that are neither, and keys of those.
    """

    fingerprint: Fingerprint
    manifest: Manifest
    report: Callable[[str, Any], None]
    retries: int = 1
    max_failures: int | None = None
    seed: int | None = None
    finished: int = 0
    left: dict[Key, Item] = field(default_factory=dict)
    failed: set[Key] = field(default_factory=set)

    @property
    def is_cut(self) -> bool:
        return self.max_failures is not None and len(self.failed) > self.max_failures

    def run(self, items: Iterable[Item], worker: Worker) -> None:
        unfinished = self.left = {item.key: item for item in items}

        def finish(record: Record) -> None:
            self._append(record)
            self.finished += 1
            unfinished.pop((record["id"], record["k"]), None)
            self.report("item", record)

        rows: int | None = None
        while unfinished and not self.is_cut:
            try:
                worker.run_all(list(unfinished.values()), finish, rows)
            except ItemsFailed as error:
                n = len(error.items)
                if is_out_of_memory(error.__cause__) and n > 1:
                    rows = n // 2
                    self.report("note", f"out of memory with {n} at once, continuing with {rows}")
                    continue
                tries = self.retries + (n > 1)  # in a batch, another item may be responsible
                for item in error.items:
                    self._retry(item, worker, finish, error, tries)
                    unfinished.pop(item.key, None)
                    if self.is_cut:
                        break

    def _retry(
        self,
        item: Item,
        worker: Worker,
        finish: Callable[[Record], None],
        error: Exception,
        tries: int,
    ) -> None:
        """Try an item alone; record it as failed after the last try."""
        for _ in range(tries):
            try:
                worker.run_all([item], finish, 1)
                return
            except ItemsFailed as again:
                error = again
        record = {
            "id": item.row.id,
            "k": item.k,
            "status": "failed",
            "seed": item.seed,
            "prompt": item.row.prompt,
            **({"negative": item.row.negative} if item.row.negative else {}),
            "fingerprint": self.fingerprint(item),
            "error": " ".join(str(error).split())[:1000],
        }
        self._append(record)
        self.failed.add(item.key)
        self.report("failed", record)

    def _append(self, record: Record) -> None:
        self.manifest.append(record if self.seed is None else {**record, JOB_SEED: self.seed})


def find_missing(
    items: Sequence[Item], fingerprint: Fingerprint, past: Past, folder: Path, resume: bool
) -> list[Item]:
    """Items without a complete file of the same fingerprint; OptionError where manifests have some
    of them without `resume`, or with other fingerprints or formats.
    """
    known = sum(item.key in past.records for item in items)
    if known and not resume:
        raise OptionError(
            f"--out: expected a folder whose manifests have none of these items, received "
            f"{str(folder)!r}, whose manifests have {known}; add --resume to continue, or choose "
            "another folder"
        )
    missing, changed = [], []
    for item in items:
        record: dict[str, Any] = past.records.get(item.key, {})
        if record.get("status") == "ok":
            if record.get("fingerprint") != fingerprint(item):
                changed.append(item)
            elif Path(str(record.get("file"))).suffix != item.suffix:
                raise OptionError(
                    f"--resume: expected the format of the manifest in {folder}, which has "
                    f"{record.get('file')}, received {item.file}; use that --format again, or "
                    "another folder"
                )
            elif record.get("file") == item.file and is_complete(folder, record):
                continue
        missing.append(item)
    if changed:
        raise OptionError(
            "--resume: expected the prompts, model, policy and settings of the manifest in "
            f"{folder}, received others for {len(changed)} items (the first is "
            f"{changed[0].row.id}, line {changed[0].row.line}); use those again, or another folder"
        )
    return missing


def remove_temporaries(folder: Path, items: Iterable[Item]) -> None:
    """Delete temporary files that a killed process left for these items, whose manifest is locked;
    others stay, which another shard may be writing.
    """
    names = {name for item in items for name in names_of(item.file)}
    for file in folder.glob(".*.tmp"):
        temporary = _TEMPORARY.fullmatch(file.name)
        if temporary is not None and temporary["file"] in names and not file.is_dir():
            file.unlink(missing_ok=True)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a smaller batch may help."""
    import torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError)
