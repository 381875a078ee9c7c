"""Throughput of a policy against the plain loop and other baselines: runs in A/B order.

A run is one call that makes a batch of images, all of it: prompts encoded, tokens decoded, pixels
made. All sides run with the same prompts and seeds, one after the other, and change places from
round to round, so that a machine that slows down slows all. `summarise` makes the report's rows of
the runs.

Memory is the most that a run used. On CUDA the allocator counts. On Linux the kernel keeps the
process's largest resident size and forgets it when told to (`clear_refs`, proc(5)), weights and
libraries included; elsewhere nothing can be told for one run alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmaccel.samplers.sampling_params import SamplingParams

STAGES = ("forward", "sampler", "pixel", "other")
_FORGET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
LEAST_RUNS = 20
SIDES = ("plain", "policy")


@dataclass(frozen=True)
class Run:
    """One measured call.

    Attributes:
        side: "plain", "policy" or the name of a baseline.
        batch_size: images it made.
        index: number of its round; below 0 to warm up, the first of all at -warm_up.
        place: in the round, from 0.
        seconds: wall time, the device synchronised before and after it.
        forward_seconds: of the model's passes; on an accelerator the time to launch them.
        sampler_seconds: of the rest of the decoding loop.
        pixel_seconds: of making pixels.
        other_seconds: what is left: tokenizing, PIL.
        tokens: made.
        passes: forward passes that tokens were drawn from (NFE), of the batch.
        row_passes: the same, summed over rows that were unfinished.
        prefill_passes: over the prompt alone, that no token was drawn from.
        draft_passes: of a draft model.
        accepted: `accepted[k]` row-passes made k + 1 tokens.
        peak_bytes: largest memory while it ran, or None where nothing tells.
        slots: of full windows, one a row-pass, where the policy has a fixed window; else None.
        captures: passes that were captured, or graphs that were compiled, while it ran.
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
    captures: int = 0

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return asdict(self)


def measure_speed(
    pipe: Any,
    policies: dict[str, Any],
    captions: Sequence[str],
    params: SamplingParams,
    *,
    batch_sizes: Sequence[int],
    runs: int,
    warm_up: int,
    seed: int,
    synchronise: Callable[[], object],
    baselines: Mapping[str, Any] | None = None,
) -> Iterator[Run]:
    """Runs as they are finished, those to warm up too.

    Args:
        pipe: a `TextToImage`.
        policies: by side, see `SIDES`.
        captions: run k makes the next ones in turn.
        filters: of all runs.
        batch_sizes: measured one after another.
        runs: of each side at each size.
        warm_up: further runs of each side at each size, not measured.
        seed: of the first image.
        synchronise: waits for the device.
        baselines: further sides by name; each has a `stream` as `pipe` has it.
    """
    sides = {side: (pipe, policies[side]) for side in SIDES}
    sides |= {name: (other, None) for name, other in (baselines or {}).items()}
    for size in batch_sizes:
        for pair in range(-warm_up, runs):
            first = max(pair, 0) * size
            texts = [captions[(first + k) % len(captions)] for k in range(size)]
            seeds = [seed + first + k for k in range(size)]
            for place, side in enumerate(order_of(list(sides), pair)):
                source, policy = sides[side]
                options = {"policy": policy, "seed": seeds, "batch_size": size}
                reset_peak(pipe.model.device)
                synchronise()
                began = time.perf_counter()
                (made,) = source.stream(texts, params, **options)
                synchronise()
                seconds = time.perf_counter() - began
                peak = read_peak(pipe.model.device)
                yield _run(side, size, pair, place, seconds, made.stats, peak, policy)


def order_of(sides: Sequence[str], index: int) -> list[str]:
    """The sides of a round: each begins as often as any, and of more than two every other turn
    runs backwards, so that none always follows the same one.
    """
    turn, first = divmod(index, len(sides))
    order = [*sides[first:], *sides[:first]]
    return order[::-1] if len(sides) > 2 and turn % 2 else order


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
        captures=stats.captures,
    )


def summarise(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row per batch size and side, ready for JSON: seconds of a run (median, p90, p99 and
    quartiles, linear between runs), passes, tokens a pass with their histogram, stages, memory, how
    much faster than the plain loop (ratio of medians; of the pairs: median and quartiles), and for
    the policy which sides are faster. Runs to warm up count for `first_seconds` alone.
    """
    rows = []
    for size in dict.fromkeys(run.batch_size for run in runs):
        of_size = [run for run in runs if run.batch_size == size]
        sides = ("plain", "policy", *(run.side for run in of_size))
        by_side = {side: [r for r in of_size if r.side == side] for side in dict.fromkeys(sides)}
        made = [_row(own, by_side["plain"]) for own in by_side.values()]
        medians = {row["side"]: row["seconds"]["median"] for row in made}
        for row in made:
            own = row["seconds"]["median"]
            faster = sorted((s for s, x in medians.items() if x < own), key=medians.__getitem__)
            row["loses_to"] = faster if row["side"] == "policy" else []
            row["loses"] = bool(row["loses_to"])
        rows += made
    return rows


def _row(every: Sequence[Run], every_plain: Sequence[Run]) -> dict[str, Any]:
    own, plain = ([r for r in runs if r.index >= 0] for runs in (every, every_plain))
    first = min(every, key=lambda run: run.index)
    seconds = [run.seconds for run in own]
    low, median, high, p90, p99 = np.percentile(seconds, [25, 50, 75, 90, 99]).tolist()
    before = {run.index: run.seconds for run in plain}
    ratios = [before[run.index] / run.seconds for run in own if run.index in before]
    lower, middle, upper = np.percentile(ratios, [25, 50, 75]).tolist()
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
        "first_seconds": first.seconds if first.index < 0 else None,
        "captures": sum(run.captures for run in own),
        "pictures_per_second": size / median,
        "tokens_per_second": tokens / n / median,
        "speed_up": speed_up,
        "pairs": {"median": middle, "quartiles": [lower, upper]},
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


def _histogram(own: Sequence[Run]) -> list[int]:
    """Row-passes that made 1, 2, … tokens, over all runs."""
    widest = max(len(run.accepted) for run in own)
    return [sum(run.accepted[k] for run in own if k < len(run.accepted)) for k in range(widest)]


def reset_peak(device: torch.device | str) -> None:
    """Begin a stretch."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _FORGET.write_text("5")
    except OSError:  # not Linux, or not allowed: `read_peak` says None
        return


def read_peak(device: torch.device | str) -> int | None:
    """Bytes at the peak since `reset_peak`; None where nothing tells."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        if not _FORGET.exists():
            return None
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith("VmHWM:")]
    return int(found[0][1]) * 1024 if found else None
