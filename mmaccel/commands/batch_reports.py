"""What a job says: a bar for people on stderr, JSON for programs on stdout."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from typing import Any, Self

from mmaccel.batch.failures import WriteError
from mmaccel.batch.manifest import Record
from mmaccel.batch.prompt_row import show
from mmaccel.commands.terminal import progress_bar


class Reports:
    """Progress on stderr, and one JSON event a line on stdout where that is wanted.

    Args:
        total: items of this run.
        is_streaming: whether events go to stdout.

    Use as a context: the bar stands while it lasts.
    """

    def __init__(self, total: int, *, is_streaming: bool) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._is_streaming, self._began = is_streaming, time.perf_counter()
        self._bar = progress_bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            refresh_per_second=10,
            disable=is_streaming and sys.stdout.isatty(),  # one screen for both
        )
        self._task = self._bar.add_task("pictures", total=total, rate="")
        self._made = self._failed = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *what: object) -> None:
        self._bar.stop()

    def made(self, record: Record) -> None:
        """See `mmaccel.batch.job.Reporter`."""
        self._made += 1
        self._step()
        self.tell("item", item=record)

    def failed(self, record: Record) -> None:
        """See `mmaccel.batch.job.Reporter`."""
        self._failed += 1
        self._step()
        name = f"{record['id']}, image {record['k']} ({show(record['prompt'])})"
        self._bar.console.print(
            f"failed: {name}: {show_line(record['error'])}", markup=False, highlight=False
        )
        self.tell("failed", item=record)

    def note(self, text: str) -> None:
        """See `mmaccel.batch.job.Reporter`."""
        self._bar.console.print(f"note: {text}", markup=False, highlight=False)
        self.tell("note", text=text)

    def tell(self, event: str, **what: Any) -> None:
        """One event as a line of JSON, if events are wanted.

        Raises:
            WriteError: nobody reads them any more.
        """
        if not self._is_streaming:
            return
        try:
            print(json.dumps({"event": event, **what}), flush=True)
        except BrokenPipeError as error:
            raise WriteError(
                "--json-stream: expected a reader of stdout, received none any more; what the "
                "manifest has is kept, go on with --resume"
            ) from error

    def _step(self) -> None:
        now = time.perf_counter()
        rate = self._made / max(now - self._began, 1e-9)
        self._bar.update(self._task, advance=1, rate=f"{rate:.2f}/s")


def show_line(text: str) -> str:
    """Text from elsewhere on one line, without what steers a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)[:500]


def print_envelope(data: dict[str, Any] | None, error: dict[str, str] | None) -> None:
    """The one object that ends a program's output: what came of it, or what went wrong."""
    with suppress(BrokenPipeError):  # the exit code says it too
        print(json.dumps({"ok": error is None, "data": data, "error": error}), flush=True)
