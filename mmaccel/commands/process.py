"""What commands change in their process: the garbage collector, logs of imports, and signals."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

STOPPED = 130  # exit code

# loggers that warn about the installation whenever their packages are imported
_TALKATIVE = ("torchao", "torch.utils._pytree")
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")  # the last is not on Windows


class Stopped(Exception):
    """A signal stopped a command; the text says which results remain."""


def pause_collector() -> None:
    """Stop Python's cycle collector until `resume_collector`: it takes a fifth of the time to the
    first token of a small model.
    """
    gc.disable()


def resume_collector() -> None:
    """Start the cycle collector again if it is paused, and exclude all objects that exist now."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


@contextmanager
def restored_collector() -> Iterator[None]:
    was_enabled = gc.isenabled()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Within the block, libraries that commands import log errors and no warnings, as torchao's."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    for logger in loggers:
        logger.addFilter(_is_error)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


class StopSignals:
    """Signals that stop a command: Ctrl-C, SIGTERM of job queues, SIGHUP of a closed terminal.

    The first raises KeyboardInterrupt, the second is ignored, while files are put in order, the
    third ends the process at once. A signal that was ignored before, as under `nohup`, stays
    ignored. A context manager restores the handlers of before.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._received = 0
        self._code: int | None = None

    def __enter__(self) -> Self:
        with suppress(ValueError):  # not in the main thread
            for name in _SIGNALS:
                number = getattr(signal, name, None)
                if number is None or signal.getsignal(number) in (None, signal.SIG_IGN):
                    continue
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        if self._code is None:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def end_process(self, code: int) -> None:
        """From here on signals end the process with its exit code, and are ignored while Python is
        torn down, which takes long with torch.
        """
        self._code = code
        atexit.register(self._ignore)

    def _ignore(self) -> None:
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def _receive(self, *_: object) -> None:
        self._received += 1
        if self._code is not None:
            os._exit(self._code)
        if self._received == 1:
            raise KeyboardInterrupt
        if self._received == 2:
            _write("mmaccel: stopping; another signal ends the process at once\n")
            return
        _write("mmaccel: ended at once\n")
        os._exit(STOPPED)


def _write(text: str) -> None:
    """Write to stderr from a signal handler, which may have interrupted a write to `sys.stderr`."""
    with suppress(OSError):
        os.write(2, text.encode("ascii"))
