"""Decoding of token rows to payloads, which all media pipelines share.

`Pipeline.decode_rows` runs a policy over the rows of a `RowPlan` with continuous batching. Each
finished row is decoded to its payload (an image, an utterance, a clip) by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any, TypeVar

from mmaccel.checks import check_int
from mmaccel.contracts import Arrivals, FinishedRow, Prompt
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.prefix_tree import PrefixTree
from mmaccel.samplers.sampling_params import SamplingParams

Payload = TypeVar("Payload")


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """A checked call."""

    prompt: Prompt  # B rows
    length: int  # tokens that a row may have at most
    max_num_seqs: int  # rows that are decoded at a time at most
    params: SamplingParams
    noise: Noise  # of B rows
    # lets rows join, as in `ContinuousBatching`
    arrivals: Callable[[int], Arrivals | None] | None = None
    prefix_tree: PrefixTree | None = None

    @cached_property
    def seeds(self) -> list[int]:
        """The seed of each row, in 0..2**64-1."""
        pairs = zip(self.noise.seeds.tolist(), self.noise.items.tolist())
        return [int(seed + item) % 2**64 for seed, item in pairs]


def pick_max_num_seqs(batch_size: int | None, rows: int) -> int:
    """How many rows are decoded at a time; a `batch_size` of None decodes all together."""
    if batch_size is None:
        return rows
    check_int("batch_size", batch_size, 1, hint="ask for 1 or more")
    return batch_size


def collect_payloads(
    payloads: dict[int, Any], deliver: Callable[[Any], None] | None
) -> Callable[[Any], None]:
    """A `deliver` that keeps each payload under its index, then calls another one."""

    def collect(payload: Any) -> None:
        payloads[payload.index] = payload
        if deliver is not None:
            deliver(payload)

    return collect


class RunningRequests:
    """Running requests by the numbers of their rows, which `begin` makes; others may join."""

    def __init__(self, begin: Callable[[dict[int, Any]], Arrivals]) -> None:
        self._begin = begin
        self._running: dict[int, Any] = {}
        self._numbers = count()

    def admit(self, requests: Sequence[Any]) -> Arrivals:
        """The rows of requests, which run from here on."""
        admitted = {number: each for each, number in zip(requests, self._numbers)}
        self._running |= admitted
        return self._begin(admitted)

    def end(self, row: FinishedRow) -> Any:
        return self._running.pop(row.row)

    def joining(
        self, arrivals: Callable[[int], Sequence[Any]] | None, check: Callable[[Any], Any] = list
    ) -> Callable[[int], Arrivals | None] | None:
        """What a `RowPlan` asks for rows that join; the requests are checked by `check`."""
        if arrivals is None:
            return None

        def receive(most: int) -> Arrivals | None:
            asked = arrivals(most)
            return self.admit(check(asked)) if asked else None

        return receive
