"""A model's locks: one run at a time in its cache, one thread where something is made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import Lock, RLock
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from mmaccel.errors import BusyError

_running: set[int] = set()  # ids of models with a run in progress
_guard = Lock()
_making: WeakKeyDictionary[Any, RLock] = WeakKeyDictionary()

P = ParamSpec("P")
T = TypeVar("T")


def in_turn(make: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Threads take turns in what makes something once for a model, its first argument."""

    @wraps(make)
    def call(model: Any, *args: P.args, **options: P.kwargs) -> T:
        with turn_of(model):
            return make(model, *args, **options)

    return call


def turn_of(model: Any) -> RLock:
    """A model's lock, which other threads wait for."""
    with _guard:
        return _making.setdefault(model, RLock())


@contextmanager
def alone(model: Any) -> Iterator[None]:
    """Lock a model for one run; BusyError if another has not ended, in a thread or a callback."""
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
