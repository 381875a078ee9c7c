"""How many threads a forward pass on a CPU should have: measured, as threads of small models, or
beside other busy processes, wait for each other, and two may take ten times as long as one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch

from mmaccel.samplers.tuner import Tuner

_GAIN = 1.05  # by how much another number of threads must be faster than torch's own
_HOPELESS = 3.0  # times the best: such a number of threads is not measured again
_MOST_ROUNDS = 4


def list_counts(most: int) -> list[int]:
    """Numbers of threads to try: powers of two up to `most`, and `most`."""
    counts = [1]
    while counts[-1] * 2 < most:
        counts.append(counts[-1] * 2)
    return [*counts, most] if most > 1 else counts


def is_chosen_already() -> bool:
    return "OMP_NUM_THREADS" in os.environ or torch.get_num_threads() == 1


def measure_threads(
    run: Callable[[], float], counts: Sequence[int], budget: float = 0.2
) -> dict[int, float]:
    """Seconds of a pass, by number of threads; torch's number is as before at the end.

    Args:
        run: runs a few passes and returns the seconds that one took.
        budget: seconds of measured passes after which no further round begins.
    """
    before = torch.get_num_threads()
    tuner = Tuner(counts, n_untimed=0)
    try:
        for _ in range(_MOST_ROUNDS):
            for count in counts:
                best = min(tuner.seconds.values(), default=0.0)
                if tuner.seconds.get(count, 0.0) > _HOPELESS * best:
                    continue
                torch.set_num_threads(count)
                tuner.add(count, run())
            if tuner.total > budget:
                break
    finally:
        torch.set_num_threads(before)
    return tuner.seconds


def choose_threads(measured: dict[int, float], default: int) -> int:
    """The fastest number of threads; torch's where none is clearly faster."""
    best = min(measured, key=lambda count: measured[count])
    if default in measured and measured[default] < _GAIN * measured[best]:
        return default
    return best


def describe_threads(measured: dict[int, float]) -> str:
    return ", ".join(f"{count}: {1000 * value:.1f} ms" for count, value in measured.items())
