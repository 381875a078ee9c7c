"""A captured step on the processor: what a CUDA graph does, so that capture can be tested anywhere.

Recording notes every operation with the very tensors it read and wrote; replaying runs the same
operations on the same tensors, and no line of Python in between. So whatever a pass takes from the
host (a pass number, a new tensor put in an attribute, a width) stands still, as in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmaccel.samplers.kept_runs import Shelf

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


class Replay:
    """`Steps` that runs a pass of a key once, records the second and replays from the third on.

    Args:
        sync_every, shelf: as in `Steps`.

    Attributes:
        replayed: passes replayed.
        recorded: keys recorded, in order.
    """

    is_static = True
    name = "graph"
    reason = ""

    def __init__(self, sync_every: int = 1, shelf: Shelf | None = None) -> None:
        self.sync_every = sync_every
        self._shelf = None if shelf is None else ref(shelf)  # which holds these steps
        self.replayed = 0
        self.recorded: list[Hashable] = []
        self.begin()

    def begin(self) -> None:
        """Forget the records."""
        self.mark = object()
        self._seen: set[Hashable] = set()
        self._records: dict[Hashable, list[Any]] = {}

    @property
    def shelf(self) -> Shelf | None:
        """See `Steps.shelf`."""
        return None if self._shelf is None else self._shelf()

    @property
    def captures(self) -> int:
        """Keys recorded so far, those forgotten too."""
        return len(self.recorded)

    def play(self, key: Hashable | None, step: Callable[[], None]) -> bool:
        """See `mmaccel.samplers.steps.Steps.play`."""
        if key is None or key not in self._seen:
            self._seen.add(key)
            step()
            return False
        if key in self._records:
            _replay(self._records[key])
            self.replayed += 1
            return True
        with _Recorder() as recorder:
            step()
        self._records[key] = recorder.operations
        self.recorded.append(key)
        return False


def count_operations(step: Callable[[], None]) -> int:
    """How many operations a step launches."""
    with torch.no_grad(), _Recorder() as recorder:
        step()
    return len(recorder.operations)
