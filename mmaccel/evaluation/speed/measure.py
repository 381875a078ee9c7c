"""The speed of decoders beside each other: `mmaccel bench` and `mmaccel evaluate speed`.

A run is one call that makes a batch of images, all of it: prompts encoded, tokens decoded, pixels
made. All sides run with the same prompts and seeds, one after the other, and change places from
round to round, so that a machine that slows down slows all. `mmaccel.evaluation.speed.rows` makes
rows of reports of the runs.

Memory is the most that a run used. On CUDA the allocator counts. On Linux the kernel keeps the
process's largest resident size and forgets it when told to (`clear_refs`, proc(5)), weights and
libraries included; elsewhere nothing can be told for one run alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mmaccel.catalog import METHODS, load
from mmaccel.pipelines.text_to_image.outputs import ImageOutput
from mmaccel.results import EXACT_DTYPE
from mmaccel.samplers.sampling_params import SamplingParams

LEAST_RUNS = 20  # of a side, for a p90
_FORGET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


@dataclass(frozen=True)
class Side:
    """What is measured.

    Attributes:
        name: of its rows.
        source: decodes; has a `stream` as `TextToImage` has it.
        policy: None for a source that has none.
        params: of all runs.
        dtype: of the generator.
    """

    name: str
    source: Any
    policy: Any
    params: SamplingParams
    dtype: str = EXACT_DTYPE

    @property
    def window(self) -> int | str | None:
        """Of the policy; None where it has none."""
        return getattr(self.policy, "window", None)


@dataclass(frozen=True)
class Batch:
    """What all sides make in a round.

    Attributes:
        index: of the round; below 0 to warm up, the first of all at -warm_up.
        prompts: B prompts.
        seeds: B seeds.
    """

    index: int
    prompts: Sequence[str]
    seeds: Sequence[int]


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

    @property
    def decoding_seconds(self) -> float:
        """Of the decoding loop, the model's passes included."""
        return self.forward_seconds + self.sampler_seconds

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Measured:
    """A run, with what it made.

    Attributes:
        side: that ran.
        run: its figures.
        made: its images.
    """

    side: Side
    run: Run
    made: ImageOutput


def measure(
    sides: Sequence[Side], batches: Iterable[Batch], synchronise: Callable[[], object]
) -> Iterator[Measured]:
    """Runs of all sides, round by round, as they are finished.

    Args:
        sides: S of them, which change places.
        batches: one a round.
        synchronise: waits for the device.
    """
    for batch in batches:
        for place, k in enumerate(order_of(range(len(sides)), batch.index)):
            yield _measure_batch(sides[k], batch, place, synchronise)


def _measure_batch(
    side: Side, batch: Batch, place: int, synchronise: Callable[[], object]
) -> Measured:
    device = side.source.model.device
    size = len(batch.prompts)
    reset_peak(device)
    synchronise()
    began = time.perf_counter()
    (made,) = side.source.stream(
        batch.prompts, side.params, policy=side.policy, seed=batch.seeds, batch_size=size
    )
    synchronise()
    seconds = time.perf_counter() - began
    stats = made.stats
    window = side.window
    source = METHODS["drafts"].get(stats.drafts)
    is_full = source is None or not load(source.target).chooses_widths
    run = Run(
        side=side.name,
        batch_size=size,
        index=batch.index,
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
        peak_bytes=read_peak(device),
        slots=stats.row_passes * window if isinstance(window, int) and is_full else None,
        captures=stats.captures,
    )
    return Measured(side, run, made)


def cut_batches(prompts: Sequence[str], seed: int, size: int) -> list[Batch]:
    """Each prompt once, `size` a round; image k has seed `seed + k`. The last may have fewer."""
    batches = []
    for index, first in enumerate(range(0, len(prompts), size)):
        part = prompts[first : first + size]
        batches.append(Batch(index, part, [seed + first + k for k in range(len(part))]))
    return batches


def repeat_batches(
    prompts: Sequence[str], seed: int, size: int, *, rounds: int, warm_up: int
) -> Iterator[Batch]:
    """Batches of one size; the prompts are taken in turn, and those to warm up are the first."""
    for index in range(-warm_up, rounds):
        first = max(index, 0) * size
        texts = [prompts[(first + k) % len(prompts)] for k in range(size)]
        yield Batch(index, texts, [seed + first + k for k in range(size)])


def order_of(sides: Sequence[Any], index: int) -> list[Any]:
    """The sides of a round: each begins as often as any, and of more than two every other turn
    runs backwards, so that none always follows the same one.
    """
    turn, first = divmod(index, len(sides))
    order = [*sides[first:], *sides[:first]]
    return order[::-1] if len(sides) > 2 and turn % 2 else order


def synchronise_for(device: str) -> Callable[[], object]:
    """What waits for a device."""
    if device.startswith("cuda"):
        return lambda: torch.cuda.synchronize(device)  # of that device, not of the current one
    return lambda: None


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
