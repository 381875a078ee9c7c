"""CUDA graphs played on the CPU, so that the runner can be tested anywhere.

Recording notes every operation with the very tensors it read and wrote; replaying runs the same
operations on the same tensors, and no line of Python in between. So whatever a pass takes from the
host (a pass number, a new tensor put in an attribute, a width) stands still, as in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmaccel.pipelines.cuda_graphs import CudaGraphRunner, GraphCache

_SYNCS = ("_local_scalar_dense", "nonzero", "_unique2", "masked_select", "equal", "is_nonzero")


class HostSync(AssertionError):
    """A pass read something back from the device."""


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket.__name__ in _SYNCS:
            raise HostSync(f"{func} reads back from the device")
        options = kwargs or {}
        out = func(*args, **options)
        self.operations.append((func, args, options, out))
        return out


@torch.no_grad()
def _replay(operations: list[Any]) -> None:
    for func, args, options, out in operations:
        made = func(*args, **options)
        for old, new in zip(tree_leaves(out), tree_leaves(made), strict=True):
            if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)


class Replay(CudaGraphRunner):
    """A runner that plays graphs on the CPU.

    Args:
        sync_every, cache: as in `CudaGraphRunner`.

    Attributes:
        replayed: steps replayed.
        recorded: keys recorded, in order.
    """

    def __init__(self, sync_every: int = 1, cache: GraphCache | None = None) -> None:
        super().__init__(torch.device("cpu"), sync_every, cache=cache)
        self._replays: list[None] = []  # a list: what replays must not keep the runner alive
        self.recorded: list[Hashable] = []

    @property
    def replayed(self) -> int:
        return len(self._replays)

    def run_step(self, key: Hashable | None, step: Callable[[], None]) -> bool:
        before = self.captures
        is_usual = super().run_step(key, step)
        if self.captures > before:
            self.recorded.append(key)
        return is_usual

    def _warm_up(self, step: Callable[[], None]) -> None:
        step()

    def _capture(self, step: Callable[[], None]) -> Callable[[], None]:
        with _Recorder() as recorder:
            step()
        operations, calls, replays = recorder.operations, count(), self._replays

        def replay() -> None:
            if next(calls):  # recording has computed the first one
                _replay(operations)
                replays.append(None)

        return replay


def count_operations(step: Callable[[], None]) -> int:
    """How many operations a step launches."""
    with torch.no_grad(), _Recorder() as recorder:
        step()
    return len(recorder.operations)
