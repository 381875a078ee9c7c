"""The decoding thread: one model, whose running batch the jobs of the queue join.

A run begins with the next job of the queue and others of its group, and takes further ones in turn
between two passes, while there is room; it ends when all rows have finished and none fits. A job
that does not fit (another image size, a prompt longer than there is room for) ends the taking: the
run empties, and the next one begins with it. So no client waits for more than the rows with which a
run begins.

What the model raises ends a run, not the server. Rows that the error names fail; the others begin
again, up to `MAX_TRIES` times, or fail too where a client has heard their beginning. With too
little memory there are half as many rows from then on.
"""

from __future__ import annotations

import logging
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from threading import Event as Flag
from threading import Thread
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmaccel.batch.worker import Setup
from mmaccel.samplers.prefix_tree import PrefixTree
from mmaccel.serving.jobs import Job, JobQueue
from mmaccel.serving.metrics import Metrics

MAX_TRIES = 2  # of a job, in runs that failed because of others
_WIDTHS = 16  # a run has room for prompts of a multiple of so many tokens

Receiver = Callable[[Job, Any], None]

logger = logging.getLogger(__package__)


class Backend(ABC):
    """A model behind the engine.

    Args:
        setup: how it is opened, and what decides what it makes, as for a prompt file.
        prefix_tree: keeps prompts for later requests; None: nothing does.

    Attributes:
        prefix_tree: see above.
        pipe: the loaded model.
        route: path of its requests.

    Raises:
        OptionError, UnsupportedModelError: the model cannot be opened.
    """

    route: ClassVar[str]

    def __init__(self, setup: Setup, prefix_tree: PrefixTree | None = None) -> None:
        self.prefix_tree = prefix_tree
        self.setup = setup
        self.pipe: Any = setup.open()

    @property
    @abstractmethod
    def example(self) -> str:
        """A text that the model takes."""

    @abstractmethod
    def jobs(self, fields: Mapping[str, Any], ticket: Any, partials: int) -> list[Job]:
        """Check a request and make its jobs. Called in any thread; nothing is decoded.

        Args:
            fields: of a row of a prompt file. Texts and numbers are within their limits, which the
                request's body has checked.
            ticket: receives what becomes of them.
            partials: unfinished payloads that are wanted of each; speech comes in chunks for any.

        Raises:
            OptionError: what this model cannot make.
        """

    @abstractmethod
    def request(self, job: Job) -> Any:
        """What the pipeline is asked for."""

    @abstractmethod
    def call(self, first: Job, finish: Receiver, hand_out: Receiver) -> Callable[..., Any]:
        """A pipeline's `serve` with the arguments that jobs of a group share.

        Args:
            first: one of them.
            finish: receives jobs and what is made of them.
            hand_out: receives pieces of it before.
        """

    def run(self, run: Run, rows: int) -> None:
        """Decode the jobs of a run and those that join it, `rows` at a time at most."""
        call = self.call(run.jobs[0], run.finish, run.hand_out)
        options = {"rows": rows, "on_step": run.step, "prompt_width": run.width}
        self._serve(call, run.jobs, run.arrivals, **options)

    def warm_up(self) -> None:
        """Run two passes of an example, which also shows whether this model can be served.

        Raises:
            OptionError, UnsupportedModelError: it cannot.
        """

        def stop(progress: Any) -> Any:
            return torch.zeros_like(progress.lengths) if progress.passes >= 2 else None

        jobs = self.jobs({"prompt": self.example, "seed": 0}, None, 0)
        call = self.call(jobs[0], lambda *made: None, lambda *made: None)
        self._serve(call, jobs, lambda most: [], rows=1, on_step=stop)

    def _serve(
        self,
        call: Callable[..., Any],
        jobs: list[Job],
        arrivals: Callable[[int], list[Job]],
        **options: Any,
    ) -> None:
        call(
            [self.request(job) for job in jobs],
            arrivals=lambda most: [self.request(job) for job in arrivals(most)],
            prefix_tree=self.prefix_tree,
            **options,
        )

    def render_partial(self, job: Job, tokens: Tensor, is_known: Tensor) -> Any:
        """The payload of an unfinished row; only of models whose jobs have `partials`.

        Args:
            job: of the row.
            tokens: `[L]` int64, meaningful where `is_known`.
            is_known: `[L]` bool.
        """
        raise NotImplementedError


class Run:
    """One run of the engine, as a backend sees it.

    Args:
        engine: it belongs to.
        jobs: with which it begins, of one group.

    Attributes:
        jobs: see above.
        group: of the jobs.
        width: tokens of the longest prompt that has room.
        running: jobs that are decoded, by number.
    """

    def __init__(self, engine: Engine, jobs: list[Job]) -> None:
        self._engine = engine
        self.jobs = jobs
        self.group: Any = jobs[0].group
        longest = max(job.width for job in jobs)
        self.width = -(-max(longest, engine.widest) // _WIDTHS) * _WIDTHS
        engine.widest = self.width
        self.running: dict[int, Job] = {}
        self._numbers = count()
        self._n_passes = 0
        self._begin(jobs)

    def arrivals(self, most: int) -> list[Job]:
        """Jobs that join the run now, at most `most`."""
        jobs = self._engine.queue.take(most, self.fits)
        self._begin(jobs)
        return jobs

    def fits(self, job: Job) -> bool:
        """Whether a job may join this run."""
        return job.group == self.group and job.width <= self.width

    def _begin(self, jobs: list[Job]) -> None:
        now = time.monotonic()
        for job in jobs:
            job.tries += 1
            self.running[next(self._numbers)] = job
            self._engine.metrics.queue_seconds.observe(now - job.arrived)
        self._engine.metrics.running.set(len(self.running))

    def step(self, progress: Any) -> Tensor | None:
        """Called after every pass: ends the rows that nobody waits for, and shows unfinished ones.

        Args:
            progress: `mmaccel.results.Progress`, or `CanvasProgress`.
        """
        self._engine.metrics.passes.inc(progress.passes - self._n_passes)
        self._n_passes = progress.passes
        self._engine.count_prefixes()
        cancelled = []
        for batch_slot, number in enumerate(progress.rows):
            job = self.running.get(number)
            if job is None:
                continue
            if job.is_cancelled:
                cancelled.append(batch_slot)
                self.drop(number)
            elif job.partials and int(progress.lengths[batch_slot]) >= job.partials[0]:
                self._show(job, progress, batch_slot)
        if not cancelled:
            return None
        limits = torch.full_like(progress.lengths, progress.tokens.shape[1] + 1)
        limits[cancelled] = 0
        return limits

    def _show(self, job: Job, progress: Any, batch_slot: int) -> None:
        tokens = progress.tokens[batch_slot]
        n = int(progress.lengths[batch_slot])
        job.partials = [at for at in job.partials if at > n]
        if n >= len(tokens):
            return
        known = getattr(progress, "is_committed", None)
        if known is None:
            is_known = torch.arange(len(tokens), device=tokens.device) < n
        else:
            is_known = known[batch_slot]
        job.tell("partial", self._engine.backend.render_partial(job, tokens, is_known))

    def hand_out(self, job: Job, piece: Any) -> None:
        """Hand out a piece of a job's payload, after which the job cannot begin again."""
        if not job.is_heard:
            self._engine.metrics.first_audio_seconds.observe(time.monotonic() - job.arrived)
        job.is_heard = True
        job.tell("partial", piece)

    def finish(self, job: Job, payload: Any) -> None:
        """Hand out what was made of a job; the one that follows it is next."""
        for number, other in self.running.items():
            if other is job:
                del self.running[number]
                break
        metrics = self._engine.metrics
        metrics.running.set(len(self.running))
        now = time.monotonic()
        seconds = now - job.arrived
        metrics.finish_row(len(payload.tokens), payload.passes, seconds)
        self._engine.seconds_per_row += 0.1 * (
            seconds / max(1, len(self.running) + 1) - self._engine.seconds_per_row
        )
        job.tell("done", payload)
        if job.following is not None:
            job.following.arrived = now
            job.following.is_heard = job.is_heard
            self._engine.queue.put_back([job.following])

    def drop(self, number: int) -> None:
        """Forget a job that nobody waits for."""
        self.running.pop(number, None)
        self._engine.metrics.running.set(len(self.running))
        self._engine.metrics.rows.labels("cancelled").inc()


class Engine:
    """The thread.

    Args:
        backend: the model.
        queue: of jobs.
        metrics: of the server.
        rows: decoded at a time at most.
        log_messages: whether the log may contain the messages of errors, which may quote prompts.

    Attributes:
        widest: tokens of the longest prompt so far, rounded up.
        rows: see above; less after memory was too little.
        has_stopped: set when the thread has ended.
        seconds_per_row: a row's share of the time, lately; for `Retry-After`.
    """

    def __init__(
        self,
        backend: Backend,
        queue: JobQueue,
        metrics: Metrics,
        rows: int,
        log_messages: bool = False,
    ) -> None:
        self.backend = backend
        self.queue = queue
        self.metrics = metrics
        self.rows = rows
        self.widest = 0
        self.has_stopped = Flag()
        self.seconds_per_row = 1.0
        self._log_messages = log_messages
        self._n_read = 0  # tokens of prompts that the metrics have counted
        self._run: Run | None = None
        self._thread = Thread(target=self._serve, name="mmaccel-decoding", daemon=True)

    def count_prefixes(self) -> None:
        """Count the tokens of prompts that were read from the prefix tree."""
        tree = self.backend.prefix_tree
        if tree is not None:
            self.metrics.prefix_tokens.inc(tree.n_read - self._n_read)
            self._n_read = tree.n_read

    def start(self) -> None:
        """Begin to decode."""
        self._thread.start()

    def close(self) -> None:
        """End at once: forget all jobs and wait for the pass that runs."""
        self.queue.close()
        self.queue.cancel_all()
        run = self._run
        for job in [] if run is None else list(run.running.values()):
            job.is_cancelled = True
        self._thread.join()

    def _serve(self) -> None:
        try:
            while (first := self.queue.wait()) is not None:
                in_group = partial(_is_in_group, first.group)
                jobs = self.queue.take(self.rows, in_group, passes_over=True)
                if jobs:
                    self._decode(jobs)
        finally:
            self.has_stopped.set()

    def _decode(self, jobs: list[Job]) -> None:
        run = Run(self, jobs)
        self._run = run
        error: Exception | None = None
        try:
            self.backend.run(run, self.rows)
        except Exception as caught:
            error = caught
            self._report(caught)
        self._run = None
        left = list(run.running)  # without an error none, unless the backend forgot some
        if left:
            self._settle(run, left, error)
        self.metrics.running.set(0)

    def _settle(self, run: Run, left: list[int], error: Exception | None) -> None:
        """Fail or repeat the jobs that a run left."""
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            self.rows = max(1, self.rows // 2)
            if self.backend.prefix_tree is not None:
                self.backend.prefix_tree.clear()
        named = set(getattr(error, "rows", None) or ())
        again = []
        for number in left:
            job = run.running[number]
            is_guilty = number in named or (not named and len(left) == 1)
            if job.is_cancelled:
                self.metrics.rows.labels("cancelled").inc()
            elif is_guilty or job.is_heard or job.tries >= MAX_TRIES:
                self.metrics.rows.labels("failed").inc()
                job.tell("failed", error)
            else:
                again.append(job)
        self.queue.put_back(again)

    def _report(self, error: Exception) -> None:
        """Log an error of a run, without its message unless prompts may be logged."""
        lines = traceback.format_tb(error.__traceback__)
        message = f": {error}" if self._log_messages else ""
        logger.error("a run failed: %s%s\n%s", type(error).__name__, message, "".join(lines))


def _is_in_group(group: Any, job: Job) -> bool:
    return bool(job.group == group)
