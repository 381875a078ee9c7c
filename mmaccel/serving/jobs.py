"""Jobs, which are the rows that requests ask for, and the bounded queue in which they wait.

The queue serves clients in turn, a job each, and the jobs of a client in the order in which they
came. The jobs of one request join it together or not at all. Event loop and decoding thread share
it.

Source: J. Nagle, RFC 970, 1985: "On packet switches with infinite storage", round-robin service.
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
    """Receives the events of one request's jobs in its event loop; made there.

    Args:
        client: who asks.
    """

    def __init__(self, client: Hashable) -> None:
        self.client = client
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
        is_heard: whether a piece of its payload was handed out that cannot be taken back.
        is_cancelled: whether nobody waits for it any more; its row is freed after the next pass.
        arrived: when it joined the queue, in seconds of `time.monotonic`.
        tries: how often it was begun.
        following: joins the queue when this one is done; None: none does.
    """

    item: Any
    group: Hashable
    width: int
    ticket: Ticket
    partials: list[int] = field(default_factory=list)
    is_heard: bool = False
    is_cancelled: bool = False
    arrived: float = field(default_factory=time.monotonic)
    tries: int = 0
    following: Job | None = None

    def tell(self, kind: Kind, value: Any) -> None:
        """Send an event to whom waits."""
        if not self.is_cancelled:
            self.ticket.put(Event(self, kind, value))


class JobQueue:
    """Jobs that wait.

    Args:
        limit: how many at most. A client of which none waits finds room for a quarter more, so that
            no other client can fill the queue before it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._jobs: dict[Hashable, deque[Job]] = {}  # by client; the first one's turn is next
        self._changed = Condition()
        self._is_closed = False

    def __len__(self) -> int:
        """Number of jobs that wait."""
        with self._changed:
            return sum(map(len, self._jobs.values()))

    def check(self, count: int, client: Hashable) -> None:
        """Check that `count` jobs of a client fit, before anything is prepared for them.

        Raises:
            QueueFull, QueueClosed: see there.
        """
        with self._changed:
            if self._is_closed:
                raise QueueClosed("server: expected no new request, because it ends, received one")
            self._drop_cancelled()
            limit = self.limit if client in self._jobs else self.limit + -(-self.limit // 4)
            if len(self) + count > limit:
                raise QueueFull(f"queue: expected at most {limit} that wait, received more")

    def put(self, jobs: Sequence[Job]) -> None:
        """Let the jobs of a request wait, all or none.

        Raises:
            QueueFull, QueueClosed: see there.
        """
        client = jobs[0].ticket.client
        with self._changed:
            self.check(len(jobs), client)
            self._jobs.setdefault(client, deque()).extend(jobs)
            self._changed.notify()

    def put_back(self, jobs: Sequence[Job]) -> None:
        """Let jobs that were begun wait again, before all others of their clients, who are next."""
        with self._changed:
            for job in reversed(jobs):
                client = job.ticket.client
                waiting = self._jobs.pop(client, deque())
                waiting.appendleft(job)
                self._jobs = {client: waiting, **self._jobs}

    def take(
        self, most: int, fits: Callable[[Job], bool], *, passes_over: bool = False
    ) -> list[Job]:
        """Take jobs in turn.

        Args:
            most: jobs at most.
            fits: whether a job can be taken.
            passes_over: whether a client whose next job does not fit is passed over, and keeps its
                turn; else that job ends the taking.
        """
        if not self._jobs:  # the usual case, once a pass
            return []
        taken: list[Job] = []
        passed: dict[Hashable, deque[Job]] = {}
        with self._changed:
            self._drop_cancelled()
            while self._jobs and len(taken) < most:
                client, waiting = next(iter(self._jobs.items()))
                if fits(waiting[0]):
                    taken.append(waiting.popleft())
                    del self._jobs[client]
                    if waiting:
                        self._jobs[client] = waiting  # its next turn comes after all others'
                elif passes_over:
                    passed[client] = self._jobs.pop(client)
                else:
                    break
            self._jobs = passed | self._jobs
        return taken

    def wait(self) -> Job | None:
        """Wait for a job; returns the next without taking it, or None once the queue is closed and
        empty.
        """
        with self._changed:
            while True:
                self._drop_cancelled()
                if self._jobs:
                    return next(iter(self._jobs.values()))[0]
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
            for waiting in self._jobs.values():
                for job in waiting:
                    job.is_cancelled = True

    def _drop_cancelled(self) -> None:
        left = {}
        for client, waiting in self._jobs.items():
            kept = deque(job for job in waiting if not job.is_cancelled)
            if kept:
                left[client] = kept
        self._jobs = left
