"""A job: generates the items that are missing, retries failed ones alone, and records each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mmaccel.batch.manifest import (
    JOB_SEED,
    Key,
    Manifest,
    Past,
    Record,
    WriteError,
    has_files,
    is_complete,
    names_of,
    read_manifests,
)
from mmaccel.batch.prompts import Item
from mmaccel.errors import MMAccelError, OptionError

_TEMPORARY = re.compile(r"\.(?P<file>.+\.\w+)\.\d+\.tmp")  # of `write_whole`


Fingerprint = Callable[[Item], str]


class ItemsFailed(MMAccelError, RuntimeError):
    """The model raised an exception, which is the cause, while it generated items.

    Attributes:
        items: those in progress, one or more of which are responsible.
    """

    def __init__(self, items: Sequence[Item], cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.items = list(items)


class Executor(Protocol):
    """Generates items: a `Worker` in this process, or Ray's actors."""

    def check(self, items: Sequence[Item]) -> Fingerprint:
        """See `Worker.check`."""

    def close(self) -> None:
        """Release processes and memory."""

    def run_all(
        self, items: Sequence[Item], on_finish: Callable[[Record], None], rows: int | None = None
    ) -> None:
        """See `Worker.run_all`."""


class Reporter(Protocol):
    """Receives the events of a job."""

    def finished(self, record: Record) -> None:
        """An image is on the disk and in the manifest."""

    def failed(self, record: Record) -> None:
        """An item failed for the last time."""

    def note(self, text: str) -> None:
        """A remark for people."""


@dataclass
class Outcome:
    """Result of a job.

    Attributes:
        finished, failed: number of items of this run.
        is_cut: whether the job ended early because too many items failed.
    """

    finished: int = 0
    failed: int = 0
    is_cut: bool = False


@dataclass
class Job:
    """The items of one process.

    Attributes:
        items: to generate.
        fingerprint: of an item.
        manifest: receives a record of every item.
        reporter: receives the events.
        retries: how often a failed item is tried again, alone.
        max_failures: the job ends when more items than this failed; None never ends it.
        seed: of the job, noted in every record.
    """

    items: list[Item]
    fingerprint: Fingerprint
    manifest: Manifest
    reporter: Reporter
    retries: int = 1
    max_failures: int | None = None
    seed: int | None = None
    outcome: Outcome = field(default_factory=Outcome)
    _left: dict[Key, Item] = field(default_factory=dict)  # neither finished nor failed
    _failed: set[Key] = field(default_factory=set)

    def run(self, executor: Executor) -> Outcome:
        """Generate all items.

        Raises:
            WriteError: an image or the manifest cannot be written; its records stay.
        """
        left = self._left = {item.key: item for item in self.items}

        def finish(record: Record) -> None:
            self._append(record)
            self.outcome.finished += 1
            del left[record["id"], record["k"]]
            self.reporter.finished(record)

        rows: int | None = None
        while left and not self.outcome.is_cut:
            try:
                executor.run_all(list(left.values()), finish, rows)
            except ItemsFailed as error:
                n = len(error.items)
                if is_out_of_memory(error.__cause__) and n > 1 and rows != 1:
                    # several actors may have failed at once: n is then more than a batch
                    rows = max(1, (n if rows is None else min(n, rows)) // 2)
                    self.reporter.note(
                        f"out of memory with {n} images at once, continuing with {rows}"
                    )
                    continue
                tries = self.retries + (n > 1)  # in a batch, another item may be responsible
                for item in error.items:
                    self._retry(item, executor, finish, error, tries)
                    left.pop(item.key, None)
                    if self.outcome.is_cut:
                        break
        return self.outcome

    def list_finished(self, items: Iterable[Item]) -> list[Item]:
        """Those of `items` that this job or an earlier one generated."""
        without = self._left.keys() | self._failed
        return [item for item in items if item.key not in without]

    def _retry(
        self,
        item: Item,
        executor: Executor,
        finish: Callable[[Record], None],
        error: Exception,
        tries: int,
    ) -> None:
        """Try an item alone; record it as failed after the last try."""
        for _ in range(tries):
            try:
                return executor.run_all([item], finish, 1)
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
        self.outcome.failed += 1
        self._failed.add(item.key)
        self.reporter.failed(record)
        most = self.max_failures
        self.outcome.is_cut = most is not None and self.outcome.failed > most

    def _append(self, record: Record) -> None:
        try:
            self.manifest.append(record if self.seed is None else {**record, JOB_SEED: self.seed})
        except OSError as error:
            raise WriteError(
                f"{self.manifest.file}: expected a manifest that can be written, received: "
                f"{error.strerror}; its records are complete, continue with --resume"
            ) from error


def find_missing(
    items: Sequence[Item], fingerprint: Fingerprint, past: Past, folder: Path
) -> list[Item]:
    """Items without a complete image of the same fingerprint.

    Raises:
        OptionError: the manifest has some of these items with other fingerprints, or in files of
            another format.
    """
    missing, changed = [], []
    for item in items:
        record: dict[str, Any] | None = past.records.get(item.key)
        if record is not None and record["status"] == "ok":
            if record.get("fingerprint") != fingerprint(item):
                changed.append(item)
            elif Path(str(record.get("file"))).suffix != Path(item.file).suffix:
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


@dataclass(frozen=True)
class Lost:
    """What a folder lacks of finished items.

    Attributes:
        files: names of images that are not there, or have not the size that was written, or lack
            the file next to them.
        lines: names of images without a record in the manifests.
    """

    files: list[str]
    lines: list[str]

    @property
    def names(self) -> list[str]:
        """The images concerned, each once."""
        return list(dict.fromkeys(self.files + self.lines))


def find_lost(items: Iterable[Item], fingerprint: Fingerprint, folder: Path) -> Lost:
    """Count what lies in a folder at the end of a job.

    The folder or a manifest may have been removed while the job ran; open files do not show that.
    Checksums are not computed again.

    Args:
        items: those that are finished.
        fingerprint: of an item.
        folder: of the job.

    Raises:
        OSError: a manifest cannot be read.
    """
    past, lost = read_manifests(folder), Lost([], [])
    for item in items:
        record = past.records.get(item.key, {})
        if record.get("status") != "ok" or record.get("fingerprint") != fingerprint(item):
            lost.lines.append(item.file)
        if not has_files(folder, {**record, "file": item.file}):
            lost.files.append(item.file)
    return lost


def check_unknown(items: Sequence[Item], past: Past, folder: Path) -> None:
    """Refuse items that a manifest of the folder has; for jobs without --resume.

    Raises:
        OptionError: the manifests have some of these items.
    """
    known = sum(item.key in past.records for item in items)
    if known:
        raise OptionError(
            f"--out: expected a folder whose manifests have none of these items, received "
            f"{str(folder)!r}, whose manifests have {known}; add --resume to continue, or choose "
            "another folder"
        )


def remove_temporaries(folder: Path, items: Iterable[Item]) -> None:
    """Delete the temporary files that a killed process left for these items.

    Other temporary files stay: another shard may be writing them. This process holds the lock of
    the manifest of these items, so that no other process writes them, unless jobs with other
    numbers of shards run at the same time.
    """
    own = {name for item in items for name in names_of(item.file)}
    for file in folder.glob(".*.tmp"):
        found = _TEMPORARY.fullmatch(file.name)
        if found is not None and found["file"] in own and not file.is_dir():
            file.unlink(missing_ok=True)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a smaller batch may help."""
    import torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError)
