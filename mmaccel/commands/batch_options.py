"""Options of `mmaccel generate --prompts`: what they may be, and what goes with what."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mmaccel.commands.run_setup import check_count
from mmaccel.errors import OptionError

ROWS = 8
LOCAL, RAY = "local", "ray"


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """The value of `--shard`: `i/n`, counted from 1.

    Raises:
        OptionError: anything else.
    """
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", text)
    index, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= index <= count:
        raise OptionError(
            f"--shard: expected i/n with i in 1..n, such as 1/4, received {text!r}; the first is 1"
        )
    return index, count


def check_counts(rows: int, retries: int | None, max_failures: int | None) -> None:
    """Refuse numbers that mean nothing.

    Raises:
        OptionError: with the option's name.
    """
    check_count("batch-size", rows)
    for name, value in (("retries", retries), ("max-failures", max_failures)):
        if value is not None and value < 0:
            raise OptionError(f"--{name}: expected 0 or more, received {value}; 0 allows none")


def check_executor(executor: str, actors: int | None) -> None:
    """Refuse an executor that is none, and a number of actors that is none or of no use.

    Raises:
        OptionError: with the option's name.
    """
    if executor not in (LOCAL, RAY):
        raise OptionError(
            f"--executor: expected {LOCAL} or {RAY}, received {executor!r}; {LOCAL} is this process"
        )
    if actors is None:
        return
    check_count("actors", actors)
    if executor != RAY:
        raise OptionError(f"--actors: expected --executor ray with it, received {executor}; add it")


def check_together(prompts: str | None, single: dict[str, Any], batch: dict[str, Any]) -> None:
    """Refuse options of one image after another beside a prompt file, and of a file without one.

    Args:
        prompts: value of `--prompts`.
        single, batch: options by name; what is None, False or empty was not given.

    Raises:
        OptionError: with the option that does not fit.
    """
    given = [name for name, value in (batch if prompts is None else single).items() if value]
    if not given:
        return
    if prompts is None:
        raise OptionError(f"{given[0]}: expected --prompts FILE beside it; it is for prompt files")
    raise OptionError(
        f"--prompts: expected no {given[0]} beside it; a row of the file says what is made, "
        "see docs/batch.md"
    )


@contextmanager
def stopped_by_terminate() -> Iterator[None]:
    """While it lasts, a request to terminate ends the job as Ctrl-C does: queues send it."""
    import signal

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
