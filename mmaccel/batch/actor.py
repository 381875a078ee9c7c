"""What runs in a process of its own: a worker whose records are handed out one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from queue import Queue
from threading import Thread
from typing import Any

from mmaccel.batch.failures import ItemsFailed
from mmaccel.batch.item import Item
from mmaccel.batch.manifest import Key, Record
from mmaccel.batch.setup import Setup
from mmaccel.batch.worker import Worker


@dataclass(frozen=True)
class Suspects:
    """Items that were in the making when the model failed.

    Attributes:
        keys: whose they are.
        error: what was raised, in words.
        is_memory: whether it was for want of memory.
    """

    keys: list[Key]
    error: str
    is_memory: bool


class WorkerActor:
    """A `Worker` behind calls that can cross processes.

    Args:
        setup: of the worker.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    @cached_property
    def _worker(self) -> Worker:
        """Loaded in a call: an error there reaches the caller as it is."""
        return Worker(self._setup)

    def check(self, items: Sequence[Item]) -> dict[Key, str]:
        """See `Worker.check`."""
        return self._worker.check(items)

    def make(self, items: Sequence[Item], rows: int | None) -> Iterator[Record | Suspects]:
        """Records as they are made, so that none is lost with this process; suspects at the end."""
        yield from _as_they_come(lambda put: self._make(items, rows, put))  # ray looks for a yield

    def _make(self, items: Sequence[Item], rows: int | None, put: Callable[[Any], None]) -> None:
        from mmaccel.batch.job import is_memory

        try:
            self._worker.run_all(items, put, rows)
        except ItemsFailed as error:
            keys = [item.key for item in error.items]
            put(Suspects(keys, str(error), is_memory(error.__cause__)))


def _as_they_come(work: Callable[[Callable[[Any], None]], None]) -> Iterator[Any]:
    """What work hands out while it runs in a thread; its exception comes last."""
    queue: Queue[tuple[str, Any]] = Queue()

    def run() -> None:
        try:
            work(lambda value: queue.put(("value", value)))
            queue.put(("end", None))
        except BaseException as error:
            queue.put(("error", error))

    thread = Thread(target=run, daemon=True)
    thread.start()
    while True:
        kind, value = queue.get()
        if kind == "value":
            yield value
            continue
        thread.join()
        if kind == "error":
            raise value
        return
