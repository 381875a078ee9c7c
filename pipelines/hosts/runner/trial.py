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
    """Seconds of the first way over those of the second, in turns; 0 where they give other numbers
    `[..., N]` in a case. Of three or more cases the first is not timed.
    """
    tuner = Tuner((1, 2))
    for case, ways in enumerate(cases):
        turns = [*enumerate(ways, 1)]
        if case % 2:
            turns.reverse()
        outputs = {number: tuner.time(number, partial(_finish, way)) for number, way in turns}
        if not compare_logits(outputs[1], outputs[2]).within(tolerance):
            return 0.0
    cost = tuner.cost(2)
    return 0.0 if cost is None else 1 / cost


def _finish(way: Way) -> Tensor:
    out = way()
    if out.is_cuda:
        torch.cuda.synchronize(out.device)
    return out


def capture(way: Way, device: torch.device) -> Way:
    """A way as a CUDA graph, after it ran once as it is."""
    way()
    outputs: list[Tensor] = []
    replay = CudaGraphRunner(device).capture(lambda: outputs.append(way()))

    def run() -> Tensor:
        replay()
        return outputs[0]

    return run
