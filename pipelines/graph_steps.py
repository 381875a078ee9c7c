"""Steps captured in CUDA graphs: a pass is launched as one thing, with no Python in between.

The first pass of a width runs as it is, on a stream of its own (libraries set themselves up at
their first call, which no graph may contain); the second is captured; from then on it is replayed.
What a pass needs of memory comes from a pool that all widths of a run share, which is safe because
they never run at once and leave nothing in it for one another.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any
from weakref import ref

import torch

from mmaccel.samplers.kept_runs import Shelf


class GraphSteps:
    """`mmaccel.samplers.steps.Steps` by CUDA graphs, on one device.

    Args:
        device: where the model is.
        sync_every: passes between two looks of the host, at least 1.
        shelf: where finished runs are kept with their graphs; None keeps none. It goes on living
            only with whoever made it.
        gives_up: whether passes go on as they are where there is no memory for a graph; otherwise
            the error is raised.

    Attributes:
        reason: why passes run as they are although they should be captured; empty while they need
            not.
        captures: passes captured so far.
        mark: see `Steps`.

    Memory: what one pass of the widest window takes, until the next `begin`.
    """

    is_static = True

    def __init__(
        self,
        device: torch.device,
        sync_every: int = 1,
        gives_up: bool = True,
        shelf: Shelf | None = None,
    ) -> None:
        self.device, self.sync_every, self.gives_up = device, sync_every, gives_up
        self.reason, self.captures = "", 0
        self._shelf = None if shelf is None else ref(shelf)  # which holds these steps
        self._stream: torch.cuda.Stream | None = None
        self.begin()

    @property
    def name(self) -> str:
        """ "graph", or "eager" once there was no memory for one."""
        return "eager" if self.reason else "graph"

    @property
    def shelf(self) -> Shelf | None:
        """Where finished runs are kept, as long as it lives."""
        return None if self._shelf is None else self._shelf()

    def begin(self) -> None:
        """A new run, with tensors of its own: earlier graphs and their memory go."""
        self.mark = object()
        self._graphs: dict[Hashable, Callable[[], None]] = {}
        self._warm: set[Hashable] = set()
        self._pool: Any = None

    def play(self, key: Hashable | None, step: Callable[[], None]) -> bool:
        """See `Steps.play`.

        Raises:
            torch.OutOfMemoryError: no memory for the graph, unless `gives_up`.
        """
        if self.reason or key is None:
            step()
            return bool(self.reason)
        replay = self._graphs.get(key)
        if replay is not None:
            replay()
            return True
        if key not in self._warm:
            self._warm.add(key)
            self._run_aside(step)
            return False
        replay, complaint = self._try(step)
        if replay is None:  # a capture cannot use what is cached for later, nor what is kept
            if self.shelf is not None:
                self.shelf.clear()
            self._free()
            replay, complaint = self._try(step)
        if replay is None:
            return self._give_up(step, complaint)
        self._graphs[key] = replay
        self.captures += 1
        replay()
        return False

    def _try(self, step: Callable[[], None]) -> tuple[Callable[[], None] | None, str]:
        """A pass as something to replay, or None and what memory said: the error itself holds on
        to the graph, and so to its memory.
        """
        try:
            return self._capture(step), ""
        except torch.OutOfMemoryError as error:
            return None, " ".join(str(error).split())

    def _give_up(self, step: Callable[[], None], complaint: str) -> bool:
        """Run a pass, of which nothing had run, as all that follow; or raise."""
        self.begin()
        self._free()
        if not self.gives_up:
            raise torch.OutOfMemoryError(f"no memory for a graph: {complaint}")
        self.reason = f"no memory for a graph ({complaint[:120]})"
        step()
        return False

    def _run_aside(self, step: Callable[[], None]) -> None:
        """Run a pass on the stream that graphs are captured on."""
        stream, current = self._side(), torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            step()
        current.wait_stream(stream)

    def _capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """A pass as something to replay; nothing is computed."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self._side()):
            # a thread of the caller's may go on allocating meanwhile: only this one is held to it
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                step()
            except BaseException:
                with suppress(RuntimeError):  # the capture is void; what voided it is raised
                    graph.capture_end()
                raise
            graph.capture_end()
        self._pool = graph.pool()
        return graph.replay

    def _side(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def _free(self) -> None:
        torch.cuda.empty_cache()
