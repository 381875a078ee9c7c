"""Items on Ray actors: one worker each, on the CPUs or GPUs of one machine or of several.

Actors write files and send their records; only the calling process writes the manifest. Another
actor replaces one that dies, and items whose records arrived are not made again.
"""

from __future__ import annotations

import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from threading import current_thread, main_thread
from typing import Any

from mmaccel.batch.job import is_out_of_memory
from mmaccel.batch.manifest import Key, Record
from mmaccel.batch.modalities import Modality
from mmaccel.batch.prompts import Item
from mmaccel.batch.worker import Fingerprint, ItemsFailed, Worker
from mmaccel.checks import importing
from mmaccel.errors import OptionError

_CHUNK = 4  # batches that an actor receives at once
_MAX_DEATHS = 2  # of actors with the same item in progress; the item then counts as failed
_WAIT = 0.05  # seconds between two looks for records


class RayExecutor:
    """A `mmaccel.batch.worker.Worker` over actors. Close it at the end.

    Args:
        modality: of every worker; the folder must be the same on all machines.
        actors: their number; None is one for each GPU, or one for each two CPUs.

    Raises:
        MissingBackendError: ray is not installed.
        OptionError: more actors than Ray has CPUs or GPUs.
    """

    def __init__(self, modality: Modality, actors: int | None = None) -> None:
        ray = _import_ray()
        self._ray, self._is_own = ray, not ray.is_initialized()
        self._actors: list[Any] = []
        if self._is_own:
            with _kept_handler():
                address = os.environ.get("RAY_ADDRESS")
                ray.init(address=address, include_dashboard=False, log_to_driver=False)
        modality = replace(modality, out=modality.out.resolve())
        self._rows = modality.rows
        kind = "GPU" if modality.load.device.startswith("cuda") else "CPU"
        n_devices = int(ray.cluster_resources().get(kind, 0))
        count = actors or max(1, n_devices if kind == "GPU" else n_devices // 2)
        if not 1 <= count <= n_devices:
            self.close()
            raise OptionError(
                f"--actors: expected 1..{n_devices} (the {kind}s Ray has), received {count}; "
                "choose fewer"
            )
        each = {"num_gpus": 1} if kind == "GPU" else {"num_cpus": max(1, n_devices // count)}
        remote = ray.remote(max_restarts=0, max_task_retries=0, **each)(WorkerActor)
        self._records = ray.util.queue.Queue(actor_options={"num_cpus": 0})
        self._start = partial(remote.remote, modality, self._records)
        self._actors = [self._start() for _ in range(count)]
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
        rows = self._rows if rows is None else rows
        left: deque[Item] = deque(items)
        failed: list[Item] = []
        causes: list[Exception] = []
        idle = list(self._actors)
        running: dict[Any, tuple[Any, dict[Key, Item]]] = {}  # task -> actor, items without result
        while left or running:
            while left and idle:
                # an even share at the end, so that no actor waits for the long queue of another
                n = min(_CHUNK * rows, max(1, -(-len(left) // len(self._actors))))
                part = [left.popleft() for _ in range(n)]
                actor = idle.pop()
                running[actor.make.remote(part, rows)] = actor, {item.key: item for item in part}
            ready, _ = self._ray.wait(list(running), num_returns=1, timeout=_WAIT)
            for record in self._records.get_nowait_batch(self._records.size()):
                for _, own in running.values():
                    own.pop((record["id"], record["k"]), None)
                on_finish(record)
            for task in ready:
                actor, own = running.pop(task)
                idle.append(actor)
                try:
                    keys, cause = self._ray.get(task)
                except self._ray.exceptions.RayActorError as error:
                    idle[-1] = self._actors[self._actors.index(actor)] = self._start()
                    self._deaths.update(list(own)[:rows])
                    keys = [key for key in own if self._deaths[key] >= _MAX_DEATHS]
                    cause = RuntimeError(f"its process died ({str(error).partition(chr(10))[0]})")
                except self._ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                failed += [own.pop(key) for key in keys]
                causes += [cause] * bool(keys)
                left.extend(own.values())  # a failure came before they began
        if failed:
            raise ItemsFailed(failed, causes[0]) from causes[0]

    def close(self) -> None:
        """End all actors, and Ray where this object started it."""
        for actor in self._actors:
            self._ray.kill(actor)
        if self._is_own:
            self._ray.shutdown()


class WorkerActor:
    """A `Worker` in a process of its own.

    Args:
        modality: of the worker.
        records: a queue of Ray that takes the record of each finished item.
    """

    def __init__(self, modality: Modality, records: Any) -> None:
        self._modality = modality
        self._records = records

    @cached_property
    def _worker(self) -> Worker:
        """Loaded in the first call, because Ray passes on the errors of calls unchanged."""
        return Worker(self._modality)

    def check(self, items: Sequence[Item]) -> dict[Key, str]:
        find = self._worker.check(items)
        return {item.key: find(item) for item in items}

    def make(self, items: Sequence[Item], rows: int) -> tuple[list[Key], Exception | None]:
        """Make items; returns the keys of those that failed, and why, as what can be sent."""
        try:
            self._worker.run_all(items, self._records.put, rows)
        except ItemsFailed as error:
            kind = MemoryError if is_out_of_memory(error.__cause__) else RuntimeError
            return [item.key for item in error.items], kind(str(error))
        return [], None


@contextmanager
def _kept_handler() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces by an exit without a word."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if current_thread() is main_thread() and before is not None:
        signal.signal(signal.SIGTERM, before)


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with importing(
        "--executor ray: expected the package ray, found none; pip install 'mmaccel[ray]'"
    ):
        import ray
        import ray.util.queue
    return ray
