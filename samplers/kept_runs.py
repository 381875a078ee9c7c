"""Kept runs: what a finished run leaves, so that the next one of its kind needs no new record.

A recorded pass works on the tensors it was recorded with. So a run whose passes are recorded leaves
its tensors, its records and the model's buffers on a shelf; the next run of the same kind takes
them down and fills the same tensors with its own prompt, seeds and counters. The Python side of a
run is always new: nothing of the last one is left in it.

A kind is everything a record has as a number or a place: the policy, the filters' values, the
layout, rows and branches, room for prompt, slots and positions, the number of stop tokens, widest
window, draft source, whether somebody is shown every pass, and what the model says of itself
(`baked`). Seeds, prompts, their lengths, the number of slots wanted and stop tokens are tensors.

What is on a run's hands is not on the shelf, so no two runs share it, and a run that did not come
to its end brings nothing back.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from torch import Tensor

if TYPE_CHECKING:
    from mmaccel.samplers.noise import Noise
    from mmaccel.samplers.steps import Steps
    from mmaccel.samplers.tally import Tally


class Key(NamedTuple):
    """What runs must have in common: the model, the state it is in, and the kind of the run."""

    owner: ref[Any]
    state: Hashable
    kind: Hashable


@dataclass(frozen=True)
class Kept:
    """What a finished run leaves.

    Attributes:
        steps: with the records.
        mark: of the steps, when the run began; another one says that they were used for others.
        tensors: of the run, by attribute.
        held: what passes hand on to the next one.
        tally, noise: of the run.
        window: of the model.
    """

    steps: Steps
    mark: object
    tensors: dict[str, Tensor]
    held: dict[str, Tensor]
    tally: Tally
    noise: Noise
    window: Any

    @property
    def is_intact(self) -> bool:
        """Whether the records are still those of the run."""
        return self.steps.mark is self.mark

    def drop(self) -> None:
        """Let the records go, whoever else knows their steps."""
        if self.is_intact:
            self.steps.begin()


class Shelf:
    """Kept runs, the latest of each kind.

    Args:
        room: kinds that are kept; the oldest goes first.
    """

    def __init__(self, room: int = 2) -> None:
        self.room = room
        self.epoch = 0  # a run that began before the last `clear` brings nothing back
        self._runs: dict[Key, Kept] = {}
        self._lock = RLock()  # freeing what is dropped may run code that closes an engine

    def __len__(self) -> int:
        return len(self._runs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are empty."""
        return Shelf, (self.room,)

    def take(self, key: Key) -> Kept | None:
        """Take down what is kept of a kind; what belongs to a model that changed or died goes."""
        with self._lock:
            for other in list(self._runs):
                is_same = other.owner == key.owner
                if other.owner() is None or (is_same and other.state != key.state):
                    self._runs.pop(other).drop()
            found = self._runs.pop(key, None)
        return found if found is not None and found.is_intact else None

    def put(self, key: Key, kept: Kept, epoch: int) -> None:
        """Keep a run that began in `epoch`."""
        with self._lock:
            if epoch != self.epoch:
                kept.drop()
                return
            earlier = self._runs.pop(key, None)
            self._runs[key] = kept
            gone = [] if earlier is None else [earlier]
            while len(self._runs) > self.room:
                gone.append(self._runs.pop(next(iter(self._runs))))
            for other in gone:
                other.drop()

    def clear(self) -> bool:
        """Keep nothing; whether there was something."""
        with self._lock:
            self.epoch += 1
            gone = list(self._runs.values())
            self._runs.clear()
            for kept in gone:
                kept.drop()
        return bool(gone)
