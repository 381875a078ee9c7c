"""One run of a model at a time: its cache belongs to whoever decodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from mmaccel.errors import BusyError

_running: set[int] = set()  # ids of models that decode now
_guard = Lock()


@contextmanager
def alone(model: Any) -> Iterator[None]:
    """Hold a model while a run lasts.

    Raises:
        BusyError: another run of this model has not ended (in a thread, or around this one).
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
