"""How many nodes a pass has as a CUDA graph, and which of them take the time.

Two ways. `profile_step` asks the profiler of a GPU: kernels, copies and fills of a replayed pass.
`record_step` and `record_pass` need no GPU: they run a pass on a CPU and count the operations that
would launch something, views and allocations left out. `record_pass` counts as on a GPU: where a
kernel of this library would run, the launches of its Triton version are counted, which are made and
not executed, and its specification computes the values, which take the kernel's place in memory.
Where torch launches more or less on a GPU than its dispatcher shows (a product split in two, a fill
before a reduction), the two differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmaccel.kernels import dispatch
from mmaccel.samplers.window.step_runner import EagerRunner, GraphKey, StaticBuffers, StepRunner

_NO_LAUNCH = (
    "_unsafe_view",
    "empty",
    "new_empty",
    "detach",
    "alias",
    "lift",
    "sym_",
    "is_",
    "_local_scalar",
)


class StaticEagerRunner(EagerRunner):
    """Runs steps as Python on static buffers: what a captured step does, where there is no GPU."""

    is_static = True

    def load(self, key: GraphKey | None, inputs: dict[str, Tensor]) -> StaticBuffers:
        return StaticBuffers({name: value.clone() for name, value in inputs.items()})


class _Counted(Exception):
    """The pass that was wanted is counted."""


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


def record_step(step: Callable[[], object]) -> Counter[str]:
    """Run a step; the operations that launch something, by name."""
    found: Counter[str] = Counter()
    with torch.no_grad(), _Counter(found):
        step()
    return found


def record_pass(
    run: Callable[[StepRunner], object], at: int = 3, without: Any = None
) -> Counter[str]:
    """Run a policy on a CPU; what one pass would launch on a GPU, by name.

    Args:
        run: carries out a whole run with the runner it is given.
        at: number of the pass that is counted, from 0.
        without: a token model whose forward is not counted; None counts everything.
    """
    found: Counter[str] = Counter()
    counter = _Counter(found)
    counter.is_paused = True

    class Watching(StaticEagerRunner):
        n_passes = 0

        def run_step(self, key: Hashable | None, step: Callable[[], None]) -> bool:
            self.n_passes += 1
            if self.n_passes <= at:
                step()
                return True
            counter.is_paused = False
            with counter:
                step()
            raise _Counted

    with torch.no_grad(), _as_kernels(counter), _left_out(without, counter), suppress(_Counted):
        run(Watching())
    return found


@contextmanager
def _left_out(model: Any, counter: _Counter) -> Iterator[None]:
    """Inside the block, forwards of a token model are not counted."""
    if model is None:
        yield
        return
    forward = model.forward

    def uncounted(*args: Any) -> Tensor:
        before, counter.is_paused = counter.is_paused, True
        try:
            logits: Tensor = forward(*args)
            return logits
        finally:
            counter.is_paused = before

    model.forward = uncounted
    try:
        yield
    finally:
        del model.forward


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
        was_paused, made = counter.is_paused, None
        if not was_paused and dispatch._refusal(specification)(*args, **options) is None:
            version = getattr(dispatch._triton_module(specification), specification.__name__)
            jit.run = count_launch
            try:
                made = version(*args, **options)
            finally:
                jit.run = launch
            counter.is_paused = True
        try:
            found = specification(*args, **options)
            if isinstance(made, Tensor) and made.stride() != found.stride():
                found = made.copy_(found)  # what reads it may have to copy, or not
            return found
        finally:
            counter.is_paused = was_paused

    dispatch.takes, dispatch.run = lambda *_: True, run_counted
    try:
        yield
    finally:
        dispatch.takes, dispatch.run = takes, run
