"""Trials of two ways to compute the same, of which the faster one runs from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from mmaccel.pipelines.hosts.runner.cuda_graphs import CudaGraphRunner
from mmaccel.samplers.compare_logits import Tolerance, compare_logits
from mmaccel.samplers.tuner import Tuner

Way = Callable[[], Tensor]


def find_gain(cases: Iterable[tuple[Way, Way]], tolerance: Tolerance) -> float:
    """Seconds of the first way over those of the second, which take turns; 0 where both do not give
    the same numbers `[..., N]` in a case.

    Args:
        cases: three or more, of which the first is not timed.
        tolerance: of the numbers.
    """
    tuner = Tuner((1, 2))
    for number, ways in enumerate(cases):
        turns = [*enumerate(ways, 1)]
        if number % 2:
            turns.reverse()
        made = {by: tuner.time(by, partial(_finish, way)) for by, way in turns}
        if not compare_logits(made[1], made[2]).within(tolerance):
            return 0.0
    cost = tuner.cost(2)
    return 0.0 if cost is None else 1 / cost


def _finish(way: Way) -> Tensor:
    made = way()
    if made.is_cuda:
        torch.cuda.synchronize(made.device)
    return made


def capture(way: Way, device: torch.device) -> Way:
    """A way as a CUDA graph, after it ran once as it is."""
    way()
    made: list[Tensor] = []
    replay = CudaGraphRunner(device).capture(lambda: made.append(way()))

    def run() -> Tensor:
        replay()
        return made[0]

    return run
