"""Throughput of a policy against the plain loop: synchronised runs in A/B order.

A run is one call that makes a batch of pictures, all of it: captions encoded, tokens decoded,
pixels made. Both sides run with the same captions and seeds, one behind the other, and change
places from pair to pair, so that a machine that slows down slows both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mmaccel.evaluation.peak_memory import read_peak, reset_peak
from mmaccel.samplers.filters import Filters

LEAST_RUNS = 20
SIDES = ("plain", "policy")


@dataclass(frozen=True)
class Run:
    """One measured call.

    Attributes:
        side: "plain" or "policy".
        batch_size: pictures it made.
        index: number of its pair; `place` 0 or 1 says which of the pair came first.
        place: see above.
        seconds: wall time, the device synchronised before and behind it.
        forward_seconds: of the model's passes; on an accelerator the time to launch them.
        sampler_seconds: of the rest of the decoding loop.
        pixel_seconds: of making pixels.
        other_seconds: what is left: captions, prompts, PIL.
        tokens: made.
        passes: forward passes behind the prompt's (NFE), of the batch.
        row_passes: the same, summed over rows that were unfinished.
        prefill_passes: over the prompt.
        draft_passes: of a draft model.
        accepted: `accepted[k]` row-passes made k + 1 tokens.
        peak_bytes: largest memory while it ran, or None where nothing tells.
        slots: of full windows, one a row-pass, where the policy has a fixed window; else None.
    """

    side: str
    batch_size: int
    index: int
    place: int
    seconds: float
    forward_seconds: float
    sampler_seconds: float
    pixel_seconds: float
    other_seconds: float
    tokens: int
    passes: int
    row_passes: int
    prefill_passes: int
    draft_passes: int
    accepted: list[int]
    peak_bytes: int | None
    slots: int | None

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return asdict(self)


def measure_speed(
    pipe: Any,
    policies: dict[str, Any],
    captions: Sequence[str],
    filters: Filters,
    *,
    batch_sizes: Sequence[int],
    runs: int,
    warm_up: int,
    seed: int,
    synchronise: Callable[[], object],
) -> Iterator[Run]:
    """Runs as they are finished.

    Args:
        pipe: a `TextToImage`.
        policies: by side, see `SIDES`.
        captions: run k makes the next ones in turn.
        filters: of all runs.
        batch_sizes: measured one after another.
        runs: of each side at each size.
        warm_up: further runs of each side at each size, not measured.
        seed: of the first picture.
        synchronise: waits for the device.
    """
    for size in batch_sizes:
        for pair in range(-warm_up, runs):
            order = SIDES if pair % 2 == 0 else SIDES[::-1]
            first = max(pair, 0) * size
            texts = [captions[(first + k) % len(captions)] for k in range(size)]
            seeds = [seed + first + k for k in range(size)]
            for place, side in enumerate(order):
                options = {"policy": policies[side], "seed": seeds, "batch_size": size}
                reset_peak(pipe.model.device)
                synchronise()
                began = time.perf_counter()
                (made,) = pipe.stream(texts, filters, **options)
                synchronise()
                seconds = time.perf_counter() - began
                if pair >= 0:
                    peak = read_peak(pipe.model.device)
                    yield _run(side, size, pair, place, seconds, made.stats, peak, policies[side])


def _run(
    side: str, size: int, index: int, place: int, seconds: float, stats: Any, peak: Any, policy: Any
) -> Run:
    window = getattr(policy, "window", None)
    return Run(
        side=side,
        batch_size=size,
        index=index,
        place=place,
        seconds=seconds,
        forward_seconds=stats.forward_seconds,
        sampler_seconds=stats.seconds - stats.forward_seconds,
        pixel_seconds=stats.pixel_seconds,
        other_seconds=seconds - stats.seconds - stats.pixel_seconds,
        tokens=stats.tokens,
        passes=stats.passes,
        row_passes=stats.row_passes,
        prefill_passes=stats.prefill_passes,
        draft_passes=stats.draft_passes,
        accepted=list(stats.accepted),
        peak_bytes=peak,
        slots=stats.row_passes * window if isinstance(window, int) else None,
    )


def summarise(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row per batch size and side, ready for JSON: seconds of a run (median, p90, p99 and
    quartiles, linear between runs), passes, tokens a pass with their histogram, stages, memory, and
    how much faster than the plain loop (ratio of medians; of the pairs: median and quartiles).
    """
    rows = []
    for size in dict.fromkeys(run.batch_size for run in runs):
        plain = [run for run in runs if (run.batch_size, run.side) == (size, "plain")]
        for side in SIDES:
            own = [run for run in runs if (run.batch_size, run.side) == (size, side)]
            rows.append(_row(own, plain))
    return rows


def _row(own: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    seconds = [run.seconds for run in own]
    low, median, high, p90, p99 = np.percentile(seconds, [25, 50, 75, 90, 99]).tolist()
    before = {run.index: run.seconds for run in plain}
    ratios = [before[run.index] / run.seconds for run in own if run.index in before]
    first, middle, last = np.percentile(ratios, [25, 50, 75]).tolist()
    tokens, row_passes = sum(r.tokens for r in own), sum(r.row_passes for r in own)
    slots = [run.slots for run in own if run.slots is not None]
    peaks = [run.peak_bytes for run in own if run.peak_bytes is not None]
    size, n = own[0].batch_size, len(own)
    speed_up = float(np.median([run.seconds for run in plain])) / median
    return {
        "side": own[0].side,
        "batch_size": size,
        "runs": n,
        "seconds": {"median": median, "p90": p90, "p99": p99, "iqr": high - low},
        "pictures_per_second": size / median,
        "tokens_per_second": tokens / n / median,
        "speed_up": speed_up,
        "pairs": {"median": middle, "quartiles": [first, last]},
        "loses": own[0].side == "policy" and speed_up < 1,
        "passes": sum(run.passes for run in own) / n,
        "row_passes": row_passes / n / size,
        "prefill_passes": sum(run.prefill_passes for run in own) / n,
        "draft_passes": sum(run.draft_passes for run in own) / n,
        "tokens_per_pass": tokens / row_passes if row_passes else 0.0,
        "unused": 1 - tokens / sum(slots) if sum(slots) else None,
        "histogram": _histogram(own),
        "stages": {name: sum(getattr(r, f"{name}_seconds") for r in own) / n for name in STAGES},
        "peak_bytes": max(peaks) if peaks else None,
    }


STAGES = ("forward", "sampler", "pixel", "other")


def _histogram(own: Sequence[Run]) -> list[int]:
    """Row-passes that made 1, 2, … tokens, over all runs."""
    widest = max(len(run.accepted) for run in own)
    return [sum(run.accepted[k] for run in own if k < len(run.accepted)) for k in range(widest)]
