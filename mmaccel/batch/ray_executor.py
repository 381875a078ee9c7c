"""Items on Ray actors: one worker each, on the CPUs or GPUs of one machine or of several.

Actors write images and return records; only the calling process writes the manifest. A new actor
replaces one that dies, and items whose records arrived are not generated again.
"""

from __future__ import annotations

import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from queue import Queue
from threading import Thread, current_thread, main_thread
from typing import Any

from mmaccel.batch.job import Fingerprint, ItemsFailed, is_out_of_memory
from mmaccel.batch.manifest import Key, Record
from mmaccel.batch.prompts import Item
from mmaccel.batch.worker import Setup, Worker
from mmaccel.checks import importing
from mmaccel.errors import OptionError

_CHUNK = 4  # batches that an actor receives at once
_MAX_DEATHS = 2  # of actors with the same item in progress; the item then counts as failed


class RayExecutor:
    """A `mmaccel.batch.job.Executor` over actors. Close it at the end.

    Args:
        setup: of every worker; the folder must be the same on all machines.
        actors: their number; None is one for each GPU, or one for each two CPUs.

    Raises:
        MissingBackendError: ray is not installed.
        OptionError: more actors than Ray has CPUs or GPUs.
    """

    def __init__(self, setup: Setup, actors: int | None = None) -> None:
        ray = _import_ray()
        self._ray, self._is_own = ray, not ray.is_initialized()
        if self._is_own:
            with _kept_handler():
                ray.init(
                    address=os.environ.get("RAY_ADDRESS"),
                    include_dashboard=False,
                    log_to_driver=False,
                )
        self._setup = replace(setup, out=setup.out.resolve())
        kind = "GPU" if setup.load.device.startswith("cuda") else "CPU"
        n_devices = int(ray.cluster_resources().get(kind, 0))
        count = actors or max(1, n_devices if kind == "GPU" else n_devices // 2)
        if not 1 <= count <= n_devices:
            self.close()
            raise OptionError(
                f"--actors: expected 1..{n_devices} (the {kind}s Ray has), received {count}; "
                "choose fewer"
            )
        each = {"num_gpus": 1} if kind == "GPU" else {"num_cpus": max(1, n_devices // count)}
        self._remote = ray.remote(max_restarts=0, max_task_retries=0, **each)(WorkerActor)
        self._actors = [self._start() for _ in range(count)]
        for actor in self._actors[1:]:
            actor.load.remote()  # while the first checks the items
        self._deaths: Counter[Key] = Counter()

    def check(self, items: Sequence[Item]) -> Fingerprint:
        """See `Worker.check`; one actor does it."""
        try:
            found: dict[Key, str] = self._ray.get(self._actors[0].check.remote(list(items)))
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        return lambda item: found[item.key]

    def run_all(
        self, items: Sequence[Item], on_finish: Callable[[Record], None], rows: int | None = None
    ) -> None:
        """See `Worker.run_all`.

        Raises:
            ItemsFailed: after all other items are finished.
            Exception: an error of an actor that no item is responsible for.
        """
        rows = self._setup.rows if rows is None else rows
        left: deque[Item] = deque(items)
        failed: list[Item] = []
        causes: list[Exception] = []
        idle, running = list(self._actors), dict[Any, _Assignment]()
        while left or running:
            while left and idle:
                # an even share at the end, so that no actor waits for the long queue of another
                n = min(_CHUNK * rows, max(1, -(-len(left) // len(self._actors))))
                assigned = _Assignment(idle.pop(), [left.popleft() for _ in range(n)])
                running[assigned.begin(rows)] = assigned
            ready, _ = self._ray.wait(list(running), num_returns=1)
            assigned = running[ready[0]]
            try:
                result: Record | FailedItems = self._ray.get(next(ready[0]))
            except StopIteration:
                del running[ready[0]]
                idle.append(assigned.actor)
                left.extend(assigned.open.values())  # the failure came before they began
            except self._ray.exceptions.RayActorError as error:
                del running[ready[0]]
                idle.append(self._replace(assigned.actor))
                self._deaths.update(list(assigned.open)[:rows])
                bad = [key for key in assigned.open if self._deaths[key] >= _MAX_DEATHS]
                failed += [assigned.open.pop(key) for key in bad]
                causes += [RuntimeError(f"its process died ({_first_line(error)})")] * bool(bad)
                left.extend(assigned.open.values())
            except self._ray.exceptions.RayTaskError as error:
                raise error.cause from None
            else:
                if isinstance(result, FailedItems):
                    failed += [assigned.open.pop(key) for key in result.keys]
                    kind = MemoryError if result.is_out_of_memory else RuntimeError
                    causes.append(kind(result.error))
                else:
                    on_finish(result)
                    del assigned.open[result["id"], result["k"]]
        if failed:
            raise ItemsFailed(failed, causes[0]) from causes[0]

    def close(self) -> None:
        """End all actors, and Ray where this object started it."""
        for actor in getattr(self, "_actors", []):
            self._ray.kill(actor)
        if self._is_own:
            self._ray.shutdown()

    def _start(self) -> Any:
        return self._remote.remote(self._setup)

    def _replace(self, actor: Any) -> Any:
        """Start another actor instead of one that died."""
        index = self._actors.index(actor)
        self._actors[index] = self._start()
        return self._actors[index]


class _Assignment:
    """The items of one actor; `open` has those without a result, in order."""

    def __init__(self, actor: Any, items: Sequence[Item]) -> None:
        self.actor = actor
        self.open = {item.key: item for item in items}

    def begin(self, rows: int) -> Any:
        """Start the actor; returns a stream of references to what `WorkerActor.make` yields."""
        make = self.actor.make.options(num_returns="streaming")
        return make.remote(list(self.open.values()), rows)


@dataclass(frozen=True)
class FailedItems:
    """`ItemsFailed` as plain values, which can be sent between processes.

    Attributes:
        keys: of the items.
        error: message.
        is_out_of_memory: see `mmaccel.batch.job.is_out_of_memory`.
    """

    keys: list[Key]
    error: str
    is_out_of_memory: bool


class WorkerActor:
    """A `Worker` in a process of its own.

    Args:
        setup: of the worker.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    @cached_property
    def _worker(self) -> Worker:
        """Loaded in the first call, because Ray passes on the errors of calls unchanged."""
        return Worker(self._setup)

    def load(self) -> None:
        """Load the model ahead of the first call, which raises what is wrong with it."""
        with suppress(Exception):
            self._worker  # noqa: B018

    def check(self, items: Sequence[Item]) -> dict[Key, str]:
        find = self._worker.check(items)
        return {item.key: find(item) for item in items}

    def make(self, items: Sequence[Item], rows: int | None) -> Iterator[Record | FailedItems]:
        """Yield a record as soon as its image is written; failed items last."""
        yield from _stream(lambda put: self._make(items, rows, put))  # ray requires a generator

    def _make(self, items: Sequence[Item], rows: int | None, put: Callable[[Any], None]) -> None:
        try:
            self._worker.run_all(items, put, rows)
        except ItemsFailed as error:
            keys = [item.key for item in error.items]
            put(FailedItems(keys, str(error), is_out_of_memory(error.__cause__)))


def _stream(work: Callable[[Callable[[Any], None]], None]) -> Iterator[Any]:
    """Run `work` in a thread and yield what it puts; an exception of the thread is raised here."""
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


@contextmanager
def _kept_handler() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces by an exit without a word."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if current_thread() is main_thread() and before is not None:
        signal.signal(signal.SIGTERM, before)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with importing(
        "--executor ray: expected the package ray, found none; pip install 'mmaccel[ray]'"
    ):
        import ray
    return ray
