"""Items on Ray actors: one worker each, on the processors or GPUs of one machine or of many.

Actors write images and hand back records alone; this process writes the manifest. In the place of
an actor that dies another begins, and what came back is not made twice.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mmaccel.batch.actor import Suspects, WorkerActor
from mmaccel.batch.failures import ItemsFailed
from mmaccel.batch.item import Item
from mmaccel.batch.manifest import Key, Record
from mmaccel.batch.setup import Setup
from mmaccel.errors import MissingBackendError, OptionError

_CHUNK = 4  # batches an actor is given at once
_DEATHS = 2  # after so many with the same item at hand, it is a suspect


class RayMaker:
    """A `mmaccel.batch.job.Maker` over actors. Close it at the end.

    Args:
        setup: of every worker; the folder must be the same place on all machines.
        actors: how many; None is one for each GPU, or one for each two processors.

    Raises:
        MissingBackendError: ray is not installed.
        OptionError: more actors than there is room for.
    """

    def __init__(self, setup: Setup, actors: int | None = None) -> None:
        ray = _import_ray()
        self._ray, self._is_own = ray, not ray.is_initialized()
        if self._is_own:
            ray.init(
                address=os.environ.get("RAY_ADDRESS"), include_dashboard=False, log_to_driver=False
            )
        self._setup = replace(setup, out=setup.out.resolve())
        kind = "GPU" if setup.device.startswith("cuda") else "CPU"
        room = int(ray.cluster_resources().get(kind, 0))
        count = actors or max(1, room if kind == "GPU" else room // 2)
        if not 1 <= count <= room:
            self.close()
            raise OptionError(
                f"--actors: expected 1..{room} (the {kind}s Ray has), received {count}; take fewer"
            )
        each = {"num_gpus": 1} if kind == "GPU" else {"num_cpus": max(1, room // count)}
        self._remote = ray.remote(max_restarts=0, max_task_retries=0, **each)(WorkerActor)
        self._actors = [self._start() for _ in range(count)]
        self._deaths: Counter[Key] = Counter()

    def check(self, items: Sequence[Item]) -> dict[Key, str]:
        """See `Worker.check`; one actor does it."""
        try:
            found: dict[Key, str] = self._ray.get(self._actors[0].check.remote(list(items)))
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        return found

    def run_all(
        self, items: Sequence[Item], deliver: Callable[[Record], None], rows: int | None = None
    ) -> None:
        """See `Worker.run_all`.

        Raises:
            ItemsFailed: when everything else is made.
            Exception: whatever an actor raises that is no item's fault.
        """
        rows = self._setup.rows if rows is None else rows
        left: deque[Item] = deque(items)
        suspects: list[Item] = []
        causes: list[Exception] = []
        idle, running = list(self._actors), dict[Any, Hand]()
        while left or running:
            while left and idle:
                # an even share at the end, so that no actor waits for another's long queue
                n = min(_CHUNK * rows, max(1, -(-len(left) // len(self._actors))))
                hand = Hand(idle.pop(), [left.popleft() for _ in range(n)])
                running[hand.begin(rows)] = hand
            ready, _ = self._ray.wait(list(running), num_returns=1)
            hand = running[ready[0]]
            try:
                told: Record | Suspects = self._ray.get(next(ready[0]))
            except StopIteration:
                del running[ready[0]]
                idle.append(hand.actor)
                left.extend(hand.open.values())  # behind a failure: not begun
            except self._ray.exceptions.RayActorError as error:
                del running[ready[0]]
                idle.append(self._replace(hand.actor))
                self._deaths.update(list(hand.open)[:rows])
                bad = [key for key in hand.open if self._deaths[key] >= _DEATHS]
                suspects += [hand.open.pop(key) for key in bad]
                causes += [RuntimeError(f"its process died ({_first_line(error)})")] * bool(bad)
                left.extend(hand.open.values())
            except self._ray.exceptions.RayTaskError as error:
                raise error.cause from None
            else:
                if isinstance(told, Suspects):
                    suspects += [hand.open.pop(key) for key in told.keys]
                    causes.append((MemoryError if told.is_memory else RuntimeError)(told.error))
                else:
                    deliver(told)
                    del hand.open[told["id"], told["k"]]
        if suspects:
            raise ItemsFailed(suspects, causes[0]) from causes[0]

    def close(self) -> None:
        """End all actors, and Ray where it was begun here."""
        for actor in getattr(self, "_actors", []):
            self._ray.kill(actor)
        if self._is_own:
            self._ray.shutdown()

    def _start(self) -> Any:
        return self._remote.remote(self._setup)

    def _replace(self, actor: Any) -> Any:
        """Another actor in the place of one that died."""
        place = self._actors.index(actor)
        self._actors[place] = self._start()
        return self._actors[place]


class Hand:
    """What an actor has at hand.

    Args:
        actor: makes it.
        items: to be made.

    Attributes:
        open: those of which nothing came back yet, in order.
    """

    def __init__(self, actor: Any, items: Sequence[Item]) -> None:
        self.actor = actor
        self.open = {item.key: item for item in items}

    def begin(self, rows: int) -> Any:
        """Have them made; a stream of references to what `WorkerActor.make` yields."""
        make = self.actor.make.options(num_returns="streaming")
        return make.remote(list(self.open.values()), rows)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingBackendError(
            "--executor ray: expected the package ray, found none; pip install 'mmaccel[ray]'"
        ) from error
    return ray
