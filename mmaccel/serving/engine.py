"""The life of a row: it waits, joins the batch that is decoded, and is delivered or cancelled.

A run begins with the next row that waits and others of its group, and takes further ones between
two passes while there is room. A row that does not fit (another image size, too long a prompt) ends
the taking: the run empties, and the next one begins with it. Clients take turns, as in J. Nagle,
RFC 970, 1985: the k-th row of a client that waits is behind the k-th turn of all others.

What the model raises ends a run, not the server. Rows that the error names fail; the others begin
again, up to `MAX_TRIES` times, or fail too where a client has heard their beginning. With too
little memory there are half as many rows from then on.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from threading import Condition, Thread
from typing import Any

import torch
from torch import Tensor

from mmaccel.samplers.prefix_tree import PrefixTree
from mmaccel.serving.errors import ApiError, log_fault, shutting_down
from mmaccel.serving.metrics import Metrics
from mmaccel.serving.settings import ServerSettings

MAX_TRIES = 2  # of a job, in runs that failed because of others
_WIDTHS = 16  # a run has room for prompts of a multiple of so many tokens
_MOST_SECONDS = 60  # of Retry-After


@dataclass(eq=False)
class Job:
    """A row that a request asks for.

    Attributes:
        group: jobs of one group may run together.
        width: tokens of its prompt.
        partials: numbers of tokens after which a piece is wanted, ascending.
        following: joins when this one is done.
        tell: called with this job and "partial" and a piece, "done" and all of it, or "failed" and
            an exception.
        place: where it waits, the least first: its turn, and its number among all.
        number: in its run.
        is_heard: whether a piece was handed out that cannot be taken back.
    """

    item: Any
    settings: Any
    group: Any
    width: int
    request: Any = None
    partials: list[int] = field(default_factory=list)
    following: Job | None = None
    client: Hashable = None
    tell: Any = None
    place: tuple[int, int] = (0, 0)
    number: int = 0
    tries: int = 0
    arrived: float = 0.0
    is_heard: bool = False
    is_cancelled: bool = False


Events = AsyncIterator[tuple[Job, str, Any]]
"""What the jobs of a request are told, until all are done."""


class Engine:
    """A model, the thread that decodes, and the jobs that wait for it or run.

    Attributes:
        width: tokens of the longest prompt that has room.
        rows: decoded at a time at most; less after memory was too little.
        prefix_tree: keeps prompts for later requests; None: nothing does.
    """

    def __init__(self, route: Any, settings: ServerSettings) -> None:
        self.route = route
        self.settings = settings
        self.waiting: list[Job] = []
        self.running: dict[int, Job] = {}
        self.width = 0
        self.rows = settings.rows
        self.metrics = Metrics(self)
        self.prefix_tree: PrefixTree | None = None
        if settings.prefix_cache:
            shared_from = settings.prefix_shared_from or None
            self.prefix_tree = PrefixTree(settings.prefix_cache, shared_from=shared_from)
        self._changed = Condition()
        self._is_closed = False
        self._arrivals = count()
        self._turn = 0  # of the jobs that were taken last
        self._group: Any = None
        self._numbers = count()
        self._n_passes = 0
        self._n_read = 0  # tokens of prompts that the metrics have counted
        self._row_seconds = 1.0  # of the last row, its share of the time
        self._thread = Thread(target=self._serve, name="mmaccel-decoding", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def drain(self) -> None:
        """Take no new jobs; those that wait or run are finished."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def close(self) -> None:
        self.drain()
        self._thread.join()

    @property
    def is_healthy(self) -> bool:
        return not self._is_closed and self._thread.is_alive()

    def put(self, jobs: list[Job], client: Hashable, tell: Callable[..., object]) -> None:
        """Let the jobs of a request wait, all or none; those that follow others come later. A
        client of which none waits finds room for a quarter more, so that no other can fill the
        queue before it.
        """
        for job in jobs:
            job.client = client
            job.tell = tell
        later = {job.following for job in jobs}
        first = [job for job in jobs if job not in later]
        most = self.settings.queue
        if len(first) > most:
            raise ApiError(400, f"n: expected at most {most}, received {len(first)}", param="n")
        with self._changed:
            if self._is_closed:
                raise shutting_down()
            turns = [job.place[0] for job in self.waiting if job.client == client]
            if not turns:
                most += -(-most // 4)
            if len(self.waiting) + len(first) > most:
                seconds = math.ceil(self._row_seconds * len(self.waiting))
                wait = str(min(max(1, seconds), _MOST_SECONDS))
                message = f"queue: expected at most {most} that wait; ask again in {wait} s"
                raise ApiError(429, message, "queue_full", **{"retry-after": wait})
            for turn, job in enumerate(first, max([self._turn, *turns]) + 1):
                job.place = (turn, next(self._arrivals))
            self._wait(first)

    def _wait(self, jobs: list[Job]) -> None:
        with self._changed:
            for job in jobs:
                job.arrived = job.arrived or time.monotonic()
                if not job.is_cancelled:
                    insort(self.waiting, job, key=attrgetter("place"))
            self._changed.notify()

    def cancel(self, jobs: list[Job]) -> None:
        """Forget jobs that nobody waits for; rows that run are freed after the next pass."""
        with self._changed:
            for job in jobs:
                job.is_cancelled = True
            self.waiting = [job for job in self.waiting if not job.is_cancelled]

    def _admit(self, most: int, *, passes_over: bool = False) -> list[Any]:
        """Let jobs of the group join the run, in turn; returns their requests. `passes_over`: jobs
        that do not fit keep their places; else the first one ends it.
        """
        taken: list[Job] = []
        with self._changed:
            for job in self.waiting:
                if job.group == self._group and job.width <= self.width:
                    taken.append(job)
                elif not passes_over:
                    break
                if len(taken) == most:
                    break
            if taken:
                self._turn = max(self._turn, taken[0].place[0])
                self.waiting = [job for job in self.waiting if job not in taken]
            for job in taken:
                job.number = next(self._numbers)
                job.tries += 1
                self.running[job.number] = job
                self.metrics.queue_seconds.observe(time.monotonic() - job.arrived)
        return [job.request for job in taken]

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.waiting or self._is_closed)
                if not self.waiting:
                    return
                self._group = self.waiting[0].group
                widths = [job.width for job in self.waiting if job.group == self._group]
                self.width = -(-max(self.width, *widths) // _WIDTHS) * _WIDTHS
                self._numbers = count()
                self._n_passes = 0
                requests = self._admit(self.rows, passes_over=True)
            error = None
            try:
                self.route.serve(
                    self.running[0],
                    requests,
                    self._receive,
                    prefix_tree=self.prefix_tree,
                    rows=self.rows,
                    on_step=self._step,
                    arrivals=self._admit,
                    prompt_width=self.width,
                )
            except Exception as caught:
                error = caught
                log_fault("a run", caught, self.settings.log_prompts)
            self._end_run(error)

    def _end_run(self, error: Exception | None) -> None:
        """Fail or repeat the jobs that a run left; without an error these were cancelled."""
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            self.rows = max(1, self.rows // 2)
            if self.prefix_tree is not None:
                self.prefix_tree.clear()
        unfinished = list(self.running.values())
        self.running.clear()
        named = getattr(error, "rows", None) or ()
        again = []
        for job in unfinished:
            is_guilty = job.number in named or (not named and len(unfinished) == 1)
            if job.is_cancelled:
                self.metrics.rows.labels("cancelled").inc()
            elif is_guilty or job.is_heard or job.tries >= MAX_TRIES:
                self.metrics.rows.labels("failed").inc()
                job.tell(job, "failed", error)
            else:
                again.append(job)
        self._wait(again)

    def _step(self, progress: Any) -> Tensor | None:
        """Called after every pass: ends rows that nobody waits for, and shows unfinished ones."""
        self.metrics.passes.inc(progress.passes - self._n_passes)
        self._n_passes = progress.passes
        n_read = getattr(self.prefix_tree, "n_read", 0)
        self.metrics.prefix_tokens.inc(n_read - self._n_read)
        self._n_read = n_read
        length = progress.tokens.shape[1]
        limits = None
        for slot, number in enumerate(progress.rows):
            job = self.running.get(number)
            if job is None:
                continue
            if job.is_cancelled:
                del self.running[number]
                self.metrics.rows.labels("cancelled").inc()
                limits = torch.full_like(progress.lengths, length + 1) if limits is None else limits
                limits[slot] = 0
            elif job.partials and job.partials[0] <= (n := int(progress.lengths[slot])) < length:
                job.partials = [at for at in job.partials if at > n]
                job.tell(job, "partial", self.route.show(job, progress, slot))
        return limits

    def _receive(self, job: Job, made: Any, *, is_whole: bool = True) -> None:
        """Tell what was made of a job, whose follower is next, or a piece of it, after which the
        job cannot begin again.
        """
        if job.is_cancelled:
            return
        seconds = time.monotonic() - job.arrived
        metrics = self.metrics
        if not is_whole:
            if not job.is_heard:
                metrics.first_audio_seconds.observe(seconds)
            job.is_heard = True
            job.tell(job, "partial", made)
            return
        del self.running[job.number]
        self._row_seconds = seconds / (len(self.running) + 1)
        metrics.rows.labels("done").inc()
        metrics.tokens.inc(len(made.tokens))
        metrics.row_passes.inc(made.passes)
        metrics.tokens_per_pass.observe(len(made.tokens) / max(1, made.passes))
        metrics.row_seconds.observe(seconds)
        job.tell(job, "done", made)
        if job.following is not None:
            job.following.place = job.place
            self._wait([job.following])
