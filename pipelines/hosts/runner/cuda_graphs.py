"""CUDA graphs: a step is captured once per window width and replayed from then on.

The graphs of a run and their static buffers form an entry of a cache, by `GraphKey`. A later run
with the same key copies its inputs there and replays. A run takes its entry out of the cache and
puts it back after its last token: nested and concurrent runs have entries of their own, and an
interrupted run puts none back.

The first step of a width runs eagerly on a side stream, because libraries initialise themselves at
their first call, which no graph may contain. The first one of a model whose passes have the same
operations (`_operations`) is a trial as well: where it synchronises with the host, torch raises,
and the run goes on eagerly. (In a capture the same mistake would leave torch's allocator broken.)
The second step is captured, later ones are replayed. A run's prompt and its first pass are steps of
their own, which the first run of a key carries out as they are, the second as a trial where there
was none yet, and later runs capture.

All widths of an entry share a memory pool: they never run at once and leave nothing in it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mmaccel.contracts import TokenModel
from mmaccel.errors import UnsupportedModelError
from mmaccel.samplers.window.step_runner import GraphKey, Once, StaticBuffers, StepRunner

Replay = Callable[[], None]
_TRIED: WeakKeyDictionary[Any, set[Hashable]] = WeakKeyDictionary()  # by model


def _operations(key: GraphKey, kind: str) -> Hashable:
    """What decides a step's operations: of its run's key, all but sizes and numbers."""
    params = key.sampling_params
    rules = tuple(value is None for value in params.rules)
    draws = (params.temperature > 0, rules, key.branches, type(key.layout), key.n_stops is None)
    drafts = (key.drafts, key.draft_weights is None)
    return kind, key.policy, key.options, draws, drafts, key.has_callback, key.is_refilled


@dataclass
class GraphEntry(StaticBuffers):
    """The static buffers of one key, and the graphs that read and write them, by width."""

    graphs: dict[Hashable, Replay] = field(default_factory=dict)  # by the step's key
    warm: set[Hashable] = field(default_factory=set)  # keys of steps that ran once
    eager: set[Once] = field(default_factory=set)  # of once-a-run steps that cannot be captured
    pool: Any = None  # memory of the captures
    stream: torch.cuda.Stream | None = None
    layouts: list[Any] = field(default_factory=list)  # that hold tables which graphs read


class GraphCache:
    """Finished runs' entries, the latest of each key; of more than `size` the oldest is dropped."""

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self.version = 0  # an entry taken before the last `clear` is not put back
        self._entries: dict[GraphKey, GraphEntry] = {}
        self._lock = RLock()  # freeing an entry may run code that clears a cache

    def __len__(self) -> int:
        return len(self._entries)

    def __reduce__(self) -> tuple[Any, ...]:
        return GraphCache, (self.size,)

    def take(self, key: GraphKey) -> GraphEntry | None:
        """Take out a key's entry; those whose models or weights are gone or changed are dropped."""
        with self._lock:
            for other in list(self._entries):
                is_same = other.model == key.model
                has_changed = is_same and other.model_state != key.model_state
                is_gone = other.draft_weights is not None and other.draft_weights() is None
                if has_changed or is_gone or other.model() is None:
                    del self._entries[other]
            return self._entries.pop(key, None)

    def put(self, key: GraphKey, entry: GraphEntry, version: int) -> None:
        """Put the entry of a run that started at `version` into the cache."""
        with self._lock:
            if version == self.version:
                self._entries.pop(key, None)
                self._entries[key] = entry
                while len(self._entries) > self.size:
                    del self._entries[next(iter(self._entries))]

    def clear(self) -> bool:
        with self._lock:
            self.version += 1
            had_entries = bool(self._entries)
            self._entries.clear()
        return had_entries


@contextmanager
def synchronising(mode: Literal["error", "default"]) -> Iterator[None]:
    """Inside the block torch raises RuntimeError where any thread synchronises, or not."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class CudaGraphRunner(StepRunner):
    """Captures steps in CUDA graphs, on one device.

    Args:
        sync_every: steps between two synchronisations with the host.
        falls_back: whether steps run eagerly without memory for a graph; else the error is raised.
        cache: graphs of earlier runs; None shares no graphs between runs.

    Memory: that of one step of the widest window, as long as the entry lives.
    """

    is_static = True

    def __init__(
        self,
        device: torch.device,
        sync_every: int = 1,
        falls_back: bool = True,
        cache: GraphCache | None = None,
    ) -> None:
        super().__init__(sync_every)
        self.device = device
        self.falls_back = falls_back
        self._cache = GraphCache(0) if cache is None else cache
        self.has_cache = cache is not None
        self.load(None, {})

    @property
    def name(self) -> str:
        """ "cuda graphs", or "eager" once there was no memory for one."""
        return "eager" if self.reason else "cuda graphs"

    def load(self, key: GraphKey | None, inputs: dict[str, Tensor]) -> GraphEntry:
        entry = None if key is None else self._cache.take(key)
        if entry is None:
            entry = GraphEntry({name: value.clone() for name, value in inputs.items()})
        else:
            for name, value in inputs.items():
                entry.inputs[name].copy_(value)
        self._key, self._entry, self._version = key, entry, self._cache.version
        return entry

    def reserve(self, model: TokenModel, rows: int, positions: int) -> None:
        graph_model: Any = model  # only one with `CapturedBuffers` has a key
        if self._key is None:
            model.reserve(rows, positions)
        elif self._entry.model is None:
            self._entry.model = graph_model.reserve_static(rows, positions)
        else:
            graph_model.load_static(self._entry.model)

    def run_step(self, key: Hashable | None, step: Callable[[], None]) -> bool:
        """Raises, unless it falls back, where memory lacks or a step synchronises with the host."""
        if self.reason or key is None:
            step()
            return bool(self.reason)
        graphs = self._entry.graphs
        warm = self._entry.warm
        if key in graphs:
            graphs[key]()
            return True
        if isinstance(key, Once):
            return self._run_once(key, step)
        if key not in warm:
            warm.add(key)
            if self._is_tried():
                self._warm_up(step)
                return False
            text = self._try_step(step)[:120]
            if not text:
                return False
            error: Exception = UnsupportedModelError(
                "cuda_graphs=True: expected passes that never synchronise with the host, received "
                f'one that does ({text}); set cuda_graphs="auto"'
            )
            return self._go_on(step, f"a pass that synchronises with the host ({text})", error)
        replay, text = self._try_capture(step)
        if replay is None:  # a capture cannot use memory that is cached
            self.free_memory()
            replay, text = self._try_capture(step)
        if replay is None:
            self._entry.graphs.clear()
            self._entry.pool = None
            self._empty_allocator()
            error = torch.OutOfMemoryError(f"no memory for a graph: {text}")
            return self._go_on(step, f"no memory for a graph ({text[:120]})", error)
        self._store(key, replay)
        return False

    def _run_once(self, key: Once, step: Callable[[], None]) -> bool:
        """A step that runs have once each: the first run's as it is, then a trial, then captured.
        One that cannot be captured runs eagerly, the rest of its run is captured all the same.
        """
        entry = self._entry
        if self._key is None or key in entry.eager or key not in entry.warm:
            entry.warm.add(key)
            step()
        elif not self._is_tried(key.kind):
            if self._try_step(step, key.kind):
                entry.eager.add(key)
                step()
        else:
            replay, _ = self._try_capture(step)
            if replay is None:
                entry.eager.add(key)
                step()
            else:
                self._store(key, replay)
        return False

    def _store(self, key: Hashable, replay: Replay) -> None:
        self._entry.graphs[key] = replay
        if self._key is not None:  # a graph of this run alone dies with it
            self._entry.layouts.append(self._key.layout)
        self.captures += not isinstance(key, Once)
        replay()

    def finish(self) -> None:
        if self._key is not None and not self.reason:
            self._cache.put(self._key, self._entry, self._version)
        self.load(None, {})  # an entry in the cache belongs to another run from now on

    def free_memory(self) -> bool:
        is_current = self._version == self._cache.version
        has_freed = self._cache.clear()
        if is_current:
            self._version = self._cache.version
        self._empty_allocator()
        return has_freed

    def _try_capture(self, step: Callable[[], None]) -> tuple[Replay | None, str]:
        """Capture a step, or the error's text: the error would keep the graph's memory alive."""
        try:
            return self.capture(step), ""
        except torch.OutOfMemoryError as error:
            return None, " ".join(str(error).split())

    def _trials(self) -> set[Hashable]:
        model = None if self._key is None else self._key.model()
        return set() if model is None else _TRIED.setdefault(model, set())

    def _is_tried(self, kind: str = "") -> bool:
        return self._key is not None and _operations(self._key, kind) in self._trials()

    def _try_step(self, step: Callable[[], None], kind: str = "") -> str:
        """Warm up with a step that must not synchronise. If it does, what outlives a step is as
        before, and the error's text is returned.
        """
        tensors = [*self._entry.inputs.values(), *self._entry.state.values()]
        before = [tensor.clone() for tensor in tensors]
        try:
            with self._refuse_sync():
                self._warm_up(step)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
            return " ".join(str(error).split())
        if self._key is not None:
            self._trials().add(_operations(self._key, kind))
        return ""

    def _refuse_sync(self) -> AbstractContextManager[None]:
        return synchronising("error")

    def _go_on(self, step: Callable[[], None], reason: str, error: Exception) -> bool:
        if not self.falls_back:
            raise error
        self.reason = reason
        step()
        return False

    def _warm_up(self, step: Callable[[], None]) -> None:
        stream = self._side_stream()
        current = torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                step()
        finally:  # what a trial has done is undone on the current stream
            current.wait_stream(stream)

    def capture(self, step: Callable[[], None]) -> Replay:
        """Capture a step without running it; returns its replay.

        cuBLAS' workspace of the stream is dropped before and after: with one in the graph's own
        pool, no other code that drops workspaces (torch.compile) frees memory that replays write
        to.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        torch._C._cuda_clearCublasWorkspaces()
        with torch.cuda.stream(self._side_stream()):
            # other threads may allocate during the capture: only this thread is checked
            graph.capture_begin(self._entry.pool, capture_error_mode="thread_local")
            try:
                step()
            except BaseException:
                with suppress(RuntimeError):  # the capture is invalid; raise the first error
                    graph.capture_end()
                raise
            graph.capture_end()
        torch._C._cuda_clearCublasWorkspaces()
        self._entry.pool = graph.pool()
        return graph.replay

    def _side_stream(self) -> torch.cuda.Stream:
        if self._entry.stream is None:
            self._entry.stream = torch.cuda.Stream(self.device)
        return self._entry.stream

    def _empty_allocator(self) -> None:
        torch.cuda.empty_cache()
