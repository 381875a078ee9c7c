"""Decoding of token rows to payloads, which all media pipelines share.

A checked call becomes a `RowPlan`. `Pipeline.decode_rows` runs a policy over its rows with
continuous batching. Each finished row is decoded to its payload (an image, an utterance, a clip) by
itself, and the payload is delivered while other rows still run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, TypeVar

from mmaccel.checks import check_int, show
from mmaccel.contracts import Arrivals, FinishedRow, Prompt
from mmaccel.errors import OptionError
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.prefix_tree import PrefixTree
from mmaccel.samplers.sampling_params import SamplingParams

Payload = TypeVar("Payload")


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """A checked call.

    Attributes:
        prompt: B rows.
        length: tokens that a row may have at most.
        max_num_seqs: rows that are decoded at a time at most.
        params: guidance, temperature, truncation and logits processor.
        noise: of B rows.
        arrivals: lets rows join; see `mmaccel.contracts.ContinuousBatching`.
        prefix_tree: of prompts that were processed; see there.
    """

    prompt: Prompt
    length: int
    max_num_seqs: int
    params: SamplingParams
    noise: Noise
    arrivals: Callable[[int], Arrivals | None] | None = None
    prefix_tree: PrefixTree | None = None

    @cached_property
    def seeds(self) -> list[int]:
        """The seed of each row, in 0..2**64-1."""
        pairs = zip(self.noise.seeds.tolist(), self.noise.items.tolist())
        return [int(seed + item) % 2**64 for seed, item in pairs]


def pick_max_num_seqs(batch_size: int | None, rows: int) -> int:
    """How many of `rows` rows are decoded at a time; a `batch_size` of None decodes all together.

    Raises:
        OptionError: a `batch_size` below 1.
    """
    if batch_size is None:
        return rows
    check_int("batch_size", batch_size, 1, hint="ask for 1 or more")
    return batch_size


def check_deliver(deliver: Any) -> None:
    """Check that `deliver` can be called.

    Raises:
        OptionError: it cannot.
    """
    if not callable(deliver):
        raise OptionError(f"deliver: expected a function, received {show(deliver)}; give one")


def collect_payloads(
    payloads: dict[int, Any], deliver: Callable[[Any], None] | None
) -> Callable[[Any], None]:
    """A `deliver` that stores each payload in `payloads` under its index, then calls `deliver`.

    Raises:
        OptionError: `deliver` is neither None nor a function.
    """
    if deliver is not None:
        check_deliver(deliver)

    def collect(payload: Any) -> None:
        payloads[payload.index] = payload
        if deliver is not None:
            deliver(payload)

    return collect


class RunningRequests:
    """The requests of a run that have not finished, by the numbers of their rows; others may join.

    Args:
        begin: makes the rows of requests, which it receives by number.
    """

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
        """The request of a row that has ended."""
        return self._running.pop(row.row)

    def joining(
        self, arrivals: Callable[[int], Sequence[Any]] | None, check: Callable[[Any], Any] = list
    ) -> Callable[[int], Arrivals | None] | None:
        """What a `RowPlan` asks for rows that join.

        Args:
            arrivals: see `TextToImage.serve`.
            check: of the requests that it returns.
        """
        if arrivals is None:
            return None

        def receive(most: int) -> Arrivals | None:
            asked = arrivals(most)
            return self.admit(check(asked)) if asked else None

        return receive


@dataclass
class RunProgress:
    """Progress of a run for progress bars, from the reports after each pass and the payloads.

    Args:
        rows: rows of the run.

    Attributes:
        length: tokens that a row may have at most; 0 before the first pass.
    """

    rows: int
    length: int = 0
    _finished: set[int] = field(default_factory=set)
    _running: dict[int, int] = field(default_factory=dict)  # row -> tokens decoded so far

    def update(self, progress: Any) -> None:
        """Read the state after a pass, a `mmaccel.results.Progress`."""
        self.length = progress.tokens.shape[1]
        running = zip(progress.rows, progress.lengths.tolist())
        self._running = {row: n for row, n in running if row not in self._finished}

    def finish(self, index: int) -> None:
        """Count a row whose payload is finished as complete, however short it is."""
        self._finished.add(index)
        self._running.pop(index, None)

    @property
    def payloads(self) -> float:
        """Number of finished payloads plus the fractions of the running ones."""
        running = sum(self._running.values()) / self.length if self.length else 0.0
        return len(self._finished) + running

    @property
    def tokens(self) -> int:
        """Tokens decoded so far; a finished row counts as `length` tokens."""
        return len(self._finished) * self.length + sum(self._running.values())

    @property
    def total(self) -> int:
        """`tokens` at the end of the run."""
        return self.rows * self.length
