"""stdout and stderr of a command, which may be closed, full, or read by nobody. That ends no
command that is at work: its files are finished, and the exit code says how it went.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class _Guarded:
    """A stream whose writes never fail: what cannot be written is dropped, and `error` is why."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _drop(self, error: OSError) -> None:
        """Redirect the stream, with what it has in its buffer, to nothing."""
        self.error = self.error or error
        with suppress(OSError, ValueError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self._stream.fileno())
            os.close(nothing)


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Replace stdout and stderr by streams whose writes never fail.

    Where one is closed, as by `2>&-`, the system would give its number to the next file that is
    opened, and `print(file=sys.stderr)` would print to stdout: such streams lead to nothing.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    before = sys.stdin, sys.stdout, sys.stderr
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")
    streams: list[Any] = [
        open(os.devnull, "w", encoding="utf-8") if stream is None else stream
        for stream in before[1:]
    ]
    for stream in streams:
        if hasattr(stream, "reconfigure"):  # for names that the terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = map(_Guarded, streams)
    try:
        yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = before


def stdout_error() -> OSError | None:
    """Why something printed to stdout is lost; None where nothing is, as far as is known."""
    sys.stdout.flush()
    return getattr(sys.stdout, "error", None)
