"""How many nodes a pass has as a CUDA graph, and which of them take the time.

Two ways. `profile_step` asks the profiler of a GPU: kernels, copies and fills of a replayed pass.
`record_step` needs no GPU: it runs the pass on a CPU and counts the operations that would launch
something, views and allocations left out. Where a kernel of this library would run, the launches of
its Triton version are counted, which are made and not executed, and its specification computes the
values. Where torch fuses less or more on a GPU than its dispatcher shows (a cuBLAS product split
into two kernels, a fill before a reduction), the two differ by that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmaccel.kernels import dispatch

_NO_LAUNCH = ("empty", "new_empty", "detach", "alias", "lift", "sym_", "is_", "_local_scalar")


class _Counter(TorchDispatchMode):
    """Counts operations that launch something, by name."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found, self.is_paused = found, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self.is_paused and not _is_view(func) and not name.startswith(_NO_LAUNCH):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def record_step(step: Callable[[], object], kernels: bool = True) -> Counter[str]:
    """Run a step on a CPU; operations that launch something, by name.

    Args:
        step: runs one pass.
        kernels: whether the kernels of this library count as their Triton versions, as on a GPU;
            triton must be installed.
    """
    found: Counter[str] = Counter()
    with torch.no_grad(), _Counter(found) as counter:
        if not kernels:
            step()
            return found
        with _as_kernels(counter):
            step()
    return found


def profile_step(step: Callable[[], object], repeats: int = 5) -> list[dict[str, Any]]:
    """Run a captured step on a GPU under the profiler.

    Returns:
        What the device ran, the longest first: `name`, `count` and `ms` of one step.
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    found: dict[str, dict[str, Any]] = {}
    for event in profiled.events() or ():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        row = found.setdefault(event.name, {"name": event.name, "count": 0.0, "ms": 0.0})
        row["count"] += 1 / repeats
        row["ms"] += event.device_time_total / 1000 / repeats
    return sorted(found.values(), key=lambda row: -row["ms"])


def _is_view(func: Any) -> bool:
    """Whether an operation returns memory of its arguments that it does not write to."""
    returned = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


@contextmanager
def _as_kernels(counter: _Counter) -> Iterator[None]:
    """Every call of a kernel counts as its Triton version's launches."""
    jit = import_module("triton.runtime.jit").JITFunction
    takes, run, launch = dispatch.takes, dispatch.run, jit.run

    def count_launch(kernel: Any, *args: Any, **options: Any) -> None:
        counter.found[f"triton: {kernel.__name__.strip('_')}"] += 1

    def run_counted(specification: Callable[..., Any], *args: Any, **options: Any) -> Any:
        version = getattr(dispatch._triton_module(specification), specification.__name__)
        refused = dispatch._refusal(specification)(*args, **options)
        if refused is None:
            jit.run = count_launch
            try:
                version(*args, **options)
            finally:
                jit.run = launch
            counter.is_paused = True
        try:
            return specification(*args, **options)
        finally:
            counter.is_paused = False

    dispatch.takes, dispatch.run = lambda *_: True, run_counted  # type: ignore[assignment]
    try:
        yield
    finally:
        dispatch.takes, dispatch.run = takes, run
