"""Locks of a model's runs: one run at a time where runs share the model's cache, and changes of an
attached object that wait until its running calls have ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, Lock, get_ident
from typing import Any

from mmaccel.errors import BusyError

_running: set[int] = set()  # ids of models with a run in progress
_guard = Lock()


@contextmanager
def alone(model: Any) -> Iterator[None]:
    """Lock a model for one run.

    Raises:
        BusyError: another run of this model has not ended (in a thread, or in a callback).
    """
    with _guard:
        if id(model) in _running:
            raise BusyError(
                "pipeline: expected one run of a model at a time, received a call while another "
                "has not ended; wait for it, or load the model a second time"
            )
        _running.add(id(model))
    try:
        yield
    finally:
        with _guard:
            _running.discard(id(model))


class RunningCalls:
    """The calls of an attached object that have not ended, in all threads.

    Calls do not wait for each other. A change of the object waits for all of them, and calls that
    begin meanwhile wait for the change.
    """

    def __init__(self) -> None:
        self._condition = Condition()
        self._running: dict[int, int] = {}  # thread -> calls within calls
        self._changing: int | None = None  # thread

    @contextmanager
    def call(self) -> Iterator[None]:
        """Inside the block a call runs."""
        thread = get_ident()
        with self._condition:
            if thread not in self._running:
                self._condition.wait_for(lambda: self._changing in (None, thread))
            self._running[thread] = self._running.get(thread, 0) + 1
        try:
            yield
        finally:
            with self._condition:
                self._running[thread] -= 1
                if not self._running[thread]:
                    del self._running[thread]
                    self._condition.notify_all()

    @contextmanager
    def change(self, what: str) -> Iterator[None]:
        """Inside the block no call runs.

        Args:
            what: is done, for the message.

        Raises:
            BusyError: this thread is inside a call, in a callback or a stopping criterion.
        """
        thread = get_ident()
        with self._condition:
            if thread in self._running:
                raise BusyError(
                    f"{what}: expected no running call, received it from inside one; end the call "
                    f"first (a stopping criterion may return True), then {what}"
                )
            self._condition.wait_for(lambda: self._changing in (None, thread))
            outer = self._changing
            self._changing = thread
        try:
            with self._condition:
                self._condition.wait_for(lambda: not self._running)
            yield
        finally:
            with self._condition:
                self._changing = outer
                self._condition.notify_all()
