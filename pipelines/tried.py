"""A copy of something callable that says whether it remembers; what it touched is put back."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mmaccel.pipelines.watch import Watch, watch


class Tried(ABC):
    """Base of trials; a child makes `copy` and compares what is in it.

    Attributes:
        copy: to be called in the original's place.
    """

    copy: Callable[..., Any]

    def __init__(self) -> None:
        self._watches: list[Watch] = []
        self._watched: set[int] = set()
        self._was_changed = False

    @property
    def has_changed(self) -> bool:
        """Whether anything is not what it was before the copy was called."""
        is_changed = self._was_changed or self._differs()
        return is_changed or any(one.has_changed for one in self._watches)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Calls inside leave no trace: not in what is watched, nor in how random numbers go on."""
        with _same_chance():
            try:
                yield
            finally:
                self.restore()

    def restore(self) -> None:
        """Put back what was written to outside the copy."""
        self._was_changed = self.has_changed
        for one in self._watches:
            one.restore()

    def _watch(self, owner: Any) -> None:
        if id(owner) not in self._watched:
            self._watched.add(id(owner))
            self._watches += watch(owner)

    @abstractmethod
    def _differs(self) -> bool:
        """Whether the copy is not what it was."""


@contextmanager
def _same_chance() -> Iterator[None]:
    """Python's, numpy's and torch's global generators go on as if nothing had been drawn."""
    import numpy as np

    states = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
