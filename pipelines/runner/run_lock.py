"""A model's lock: one run at a time where runs share the model's cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
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
