"""A job: what is still to be made, made; what fails, tried again alone; all of it written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mmaccel.batch.failures import ItemsFailed, WriteError
from mmaccel.batch.item import Item
from mmaccel.batch.manifest import Key, Manifest, Past, Record, is_made
from mmaccel.errors import OptionError


class Maker(Protocol):
    """What makes items: a `Worker`, or something that hands them to several."""

    def check(self, items: Sequence[Item]) -> dict[Key, str]:
        """See `Worker.check`."""

    def close(self) -> None:
        """Let go of what it holds."""

    def run_all(
        self, items: Sequence[Item], deliver: Callable[[Record], None], rows: int | None = None
    ) -> None:
        """See `Worker.run_all`."""


class Reporter(Protocol):
    """What a job tells while it runs."""

    def made(self, record: Record) -> None:
        """An image is on the disk and in the manifest."""

    def failed(self, record: Record) -> None:
        """An item was given up."""

    def note(self, text: str) -> None:
        """Something a person should know."""


@dataclass
class Outcome:
    """What became of a job's items.

    Attributes:
        made, failed: in this run.
        is_cut: whether it ended early because too many failed.
    """

    made: int = 0
    failed: int = 0
    is_cut: bool = False


@dataclass
class Job:
    """Items of one process.

    Attributes:
        items: to be made, none of them made.
        recipes: fingerprint of every item.
        manifest: where it is written down.
        retries: how often a failed item is tried again, alone.
        max_failures: the job ends when more items than this failed; None never ends it.
        reporter: is told.
    """

    items: list[Item]
    recipes: dict[Key, str]
    manifest: Manifest
    reporter: Reporter
    retries: int = 1
    max_failures: int | None = None
    outcome: Outcome = field(default_factory=Outcome)

    def run(self, maker: Maker) -> Outcome:
        """Make all items.

        Raises:
            WriteError: nothing can be written any more; what the manifest has is kept.
        """
        left = {item.key: item for item in self.items}

        def deliver(record: Record) -> None:
            self._write(record)
            self.outcome.made += 1
            del left[record["id"], record["k"]]
            self.reporter.made(record)

        rows: int | None = None
        while left and not self.outcome.is_cut:
            try:
                maker.run_all(list(left.values()), deliver, rows)
            except ItemsFailed as error:
                n = len(error.items)
                if is_memory(error.__cause__) and n > 1 and rows != 1:
                    # several actors may have failed at once: n then is more than a batch
                    rows = max(1, (n if rows is None else min(n, rows)) // 2)
                    self.reporter.note(
                        f"out of memory with {n} images at once, going on with {rows}"
                    )
                    continue
                tries = self.retries + (n > 1)  # among others it may not have been to blame
                for item in error.items:
                    self._alone(item, maker, deliver, error, tries)
                    left.pop(item.key, None)
                    if self.outcome.is_cut:
                        break
        return self.outcome

    def _alone(
        self,
        item: Item,
        maker: Maker,
        deliver: Callable[[Record], None],
        error: Exception,
        tries: int,
    ) -> None:
        """Try an item that was there when something failed; give it up after the last try."""
        for _ in range(tries):
            try:
                return maker.run_all([item], deliver, 1)
            except ItemsFailed as again:
                error = again
        record = {
            "id": item.row.id,
            "k": item.k,
            "status": "failed",
            "seed": item.seed,
            "prompt": item.row.prompt,
            **({"negative": item.row.negative} if item.row.negative else {}),
            "recipe": self.recipes[item.key],
            "error": " ".join(str(error).split())[:1000],
        }
        self._write(record)
        self.outcome.failed += 1
        self.reporter.failed(record)
        most = self.max_failures
        self.outcome.is_cut = most is not None and self.outcome.failed > most

    def _write(self, record: Record) -> None:
        try:
            self.manifest.append(record)
        except OSError as error:
            raise WriteError(
                f"{self.manifest.file}: expected a manifest that can be written, received: "
                f"{error.strerror}; what it has is kept, go on with --resume"
            ) from error


def still_to_make(
    items: Sequence[Item], recipes: dict[Key, str], past: Past, folder: Path
) -> list[Item]:
    """Items whose image is not there, whole and made from the same.

    Raises:
        OptionError: the manifest has some of them made from something else.
    """
    left, other = [], []
    for item in items:
        record: dict[str, Any] | None = past.records.get(item.key)
        if record is not None and record["status"] == "ok":
            if record.get("recipe") != recipes[item.key]:
                other.append(item)
            elif record.get("file") == item.file and is_made(folder, record):
                continue
        left.append(item)
    if other:
        raise OptionError(
            "--resume: expected the prompts, model, policy and settings of the manifest in "
            f"{folder}, received others for {len(other)} items (the first is {other[0].row.id}, "
            f"line {other[0].row.line}); use those again, or another folder"
        )
    return left


def check_unknown(items: Sequence[Item], past: Past, folder: Path) -> None:
    """Refuse items that a manifest has, where nobody asked to go on.

    Raises:
        OptionError: with the way to go on.
    """
    known = sum(item.key in past.records for item in items)
    if known:
        raise OptionError(
            f"--out: expected a folder whose manifests have none of these items, received "
            f"{str(folder)!r}, where they have {known}; add --resume to go on with them, or choose "
            "another folder"
        )


def is_memory(error: BaseException | None) -> bool:
    """Whether smaller batches may help."""
    import torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError)
