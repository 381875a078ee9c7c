"""What commands change in their process: the garbage collector and the signals that stop them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stopped(Exception):
    """Ctrl-C stopped a command; the text says which results remain."""


def pause_collector() -> None:
    """Stop Python's cycle collector until `resume_collector`.

    Importing torch and transformers creates several hundred thousand objects that stay. The
    collector traverses them repeatedly, which takes about a fifth of the time to the first token of
    a small model.
    """
    gc.disable()


def resume_collector() -> None:
    """Start the cycle collector again if it is paused, and exclude all objects that exist now."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


@contextmanager
def restored_collector() -> Iterator[None]:
    """Enable the collector at the end of the block if it was enabled at the beginning."""
    was_enabled = gc.isenabled()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGTERM, which job queues send, inside the block."""
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
