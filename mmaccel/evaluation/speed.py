"""Throughput of a policy against the plain loop and other baselines: runs in A/B order.

A run is one call that makes a batch of pictures, all of it: captions encoded, tokens decoded,
pixels made. All sides run with the same captions and seeds, one behind the other, and change
places from round to round, so that a machine that slows down slows all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mmaccel.evaluation.peak_memory import read_peak, reset_peak
from mmaccel.samplers.filters import Filters

LEAST_RUNS = 20
SIDES = ("plain", "policy")


@dataclass(frozen=True)
class Run:
    """One measured call.

    Attributes:
        side: "plain", "policy" or the name of a baseline.
        batch_size: pictures it made.
        index: number of its round; below 0 to warm up, the first of all at -warm_up.
        place: in the round, from 0.
        seconds: wall time, the device synchronised before and behind it.
        forward_seconds: of the model's passes; on an accelerator the time to launch them.
        sampler_seconds: of the rest of the decoding loop.
        pixel_seconds: of making pixels.
        other_seconds: what is left: captions, prompts, PIL.
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
    filters: Filters,
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
        seed: of the first picture.
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
                (made,) = source.stream(texts, filters, **options)
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
