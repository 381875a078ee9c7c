"""Signals that wait while a file and its record are written, so that there is none without the
other.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_STOPPING = ("SIGINT", "SIGTERM", "SIGHUP")


@contextmanager
def hold_signals() -> Iterator[None]:
    """Inside the block, in the main thread, signals that stop a command wait for its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[tuple[int, Any]] = []
    before: dict[int, Any] = {}
    for name in _STOPPING:
        number = getattr(signal, name, None)
        if number is not None and callable(signal.getsignal(number)):
            before[number] = signal.signal(number, lambda *given: received.append(given))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number, frame in received:
            before[number](number, frame)
