"""Jobs, which are the rows that requests ask for, and the bounded queue in which they wait.

The queue is first in, first out. The jobs of one request join it together or not at all. Event
loop and decoding thread share it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from threading import Condition
from typing import Any, Literal

from mmaccel.errors import MMAccelError

Kind = Literal["partial", "done", "failed"]


class QueueFull(MMAccelError):
    """The jobs of a request do not fit into the queue."""


class QueueClosed(MMAccelError):
    """The server ends and takes no new jobs."""


@dataclass(frozen=True)
class Event:
    """What the decoding thread tells about a job.

    Attributes:
        job: the job.
        kind: "partial" with an unfinished payload, "done" with a payload, or "failed" with an
            exception.
        value: see above.
    """

    job: Job
    kind: Kind
    value: Any


class Ticket:
    """Receives the events of one request's jobs in its event loop; made there."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def put(self, event: Event) -> None:
        """Called by the decoding thread."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop is closed: nobody waits
            pass

    async def get(self) -> Event:
        """The next event."""
        return await self._events.get()


@dataclass(eq=False)
class Job:
    """One row.

    Attributes:
        item: what the model is asked for.
        group: jobs of one group may run together.
        width: tokens of its prompt.
        ticket: receives its events.
        partials: numbers of tokens after which a partial payload is wanted, ascending.
        is_cancelled: whether nobody waits for it any more; its row is freed after the next pass.
        arrived: when it joined the queue, in seconds of `time.monotonic`.
        tries: how often it was begun.
    """

    item: Any
    group: Hashable
    width: int
    ticket: Ticket
    partials: list[int] = field(default_factory=list)
    is_cancelled: bool = False
    arrived: float = field(default_factory=time.monotonic)
    tries: int = 0

    def tell(self, kind: Kind, value: Any) -> None:
        """Send an event to whom waits."""
        if not self.is_cancelled:
            self.ticket.put(Event(self, kind, value))


class JobQueue:
    """Jobs that wait.

    Args:
        limit: how many at most.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._jobs: deque[Job] = deque()
        self._changed = Condition()
        self._is_closed = False

    def __len__(self) -> int:
        """Number of jobs that wait."""
        return len(self._jobs)

    def check(self, count: int) -> None:
        """Check that `count` jobs fit, before anything is prepared for them.

        Raises:
            QueueFull, QueueClosed: see there.
        """
        if self._is_closed:
            raise QueueClosed("server: expected no new request, because it ends")
        if len(self._jobs) + count > self.limit:
            raise QueueFull(f"queue: expected at most {self.limit} that wait")

    def put(self, jobs: Sequence[Job]) -> None:
        """Let jobs wait, all or none.

        Raises:
            QueueFull, QueueClosed: see there.
        """
        with self._changed:
            if len(self._jobs) + len(jobs) > self.limit:
                self._drop_cancelled()
            self.check(len(jobs))
            self._jobs.extend(jobs)
            self._changed.notify()

    def put_back(self, jobs: Sequence[Job]) -> None:
        """Let jobs that were begun wait again, before all others."""
        with self._changed:
            self._jobs.extendleft(reversed(jobs))

    def take(self, most: int, fits: Callable[[Job], bool]) -> list[Job]:
        """Take jobs from the front, at most `most`, up to the first that does not fit."""
        if not self._jobs:  # the usual case, once a pass
            return []
        taken: list[Job] = []
        with self._changed:
            while self._jobs and len(taken) < most:
                if not self._jobs[0].is_cancelled:
                    if not fits(self._jobs[0]):
                        break
                    taken.append(self._jobs[0])
                self._jobs.popleft()
        return taken

    def wait(self) -> Job | None:
        """Wait for a job; returns the first without taking it, or None once the queue is closed and
        empty.
        """
        with self._changed:
            while True:
                self._drop_cancelled()
                if self._jobs:
                    return self._jobs[0]
                if self._is_closed:
                    return None
                self._changed.wait()

    def close(self) -> None:
        """Take no new jobs from now on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def cancel_all(self) -> None:
        """Forget the jobs that wait."""
        with self._changed:
            for job in self._jobs:
                job.is_cancelled = True

    def _drop_cancelled(self) -> None:
        if any(job.is_cancelled for job in self._jobs):
            self._jobs = deque(job for job in self._jobs if not job.is_cancelled)
