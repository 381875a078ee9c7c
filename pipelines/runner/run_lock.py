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
    """The calls of attached objects that have not ended, in all threads.

    Calls do not wait for each other. A change of an object waits for its calls, and calls that
    begin meanwhile wait for the change; those inside a running call do not.
    """

    def __init__(self) -> None:
        self._condition = Condition()
        self._running: list[tuple[int, int]] = []  # thread and id of the object
        self._changing: int | None = None  # thread

    @contextmanager
    def call(self, target: Any) -> Iterator[None]:
        """Inside the block a call of an object runs."""
        entry = (get_ident(), id(target))
        with self._condition:
            self._await_changes(entry[0])
            self._running.append(entry)
        try:
            yield
        finally:
            with self._condition:
                self._running.remove(entry)
                self._condition.notify_all()

    @contextmanager
    def change(self, what: str, target: Any = None) -> Iterator[None]:
        """Inside the block no call of an object runs.

        Args:
            what: is done, for the message.
            target: the object; None for all of them.

        Raises:
            BusyError: this thread is inside a call, in a callback or a stopping criterion.
        """
        thread = get_ident()
        if thread in self._threads(target):
            raise BusyError(
                f"{what}: expected no running call, received it from inside one; end the call "
                f"first (a stopping criterion may return True), then {what}"
            )
        with self._condition:
            self._await_changes(thread)
            outer = self._changing
            self._changing = thread
        try:
            with self._condition:
                self._condition.wait_for(lambda: not self._threads(target))
            yield
        finally:
            with self._condition:
                self._changing = outer
                self._condition.notify_all()

    def _await_changes(self, thread: int) -> None:
        """Wait for a change by another thread, unless that may wait for this one."""
        if thread not in self._threads(None):
            self._condition.wait_for(lambda: self._changing in (None, thread))

    def _threads(self, target: Any) -> list[int]:
        """Threads with a running call of an object, or of any."""
        return [thread for thread, one in self._running if target is None or one == id(target)]
