"""Scheduler: which rows of a long prompt occupy the batch slots of a run, and which rows wait.

See `mmaccel.contracts.ContinuousBatching`. Where rows may join during the run, nothing is held of
rows that have finished: a run may go on for as long as rows arrive.

Continuous batching: G.-I. Yu et al., "Orca: A Distributed Serving System for Transformer-Based
Generative Models", OSDI 2022, section 3 (iteration-level scheduling); an iteration is a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mmaccel.contracts import Arrivals, ContinuousBatching, FinishedRow, Prompt
from mmaccel.errors import ShapeError
from mmaccel.samplers.noise import Noise


@dataclass
class Totals:
    """Sums over finished rows; the attributes are those of `mmaccel.results.Stats`."""

    tokens: int = 0
    row_passes: int = 0
    accepted: list[int] = field(default_factory=list)
    total_variation: float = 0.0
    nats: float = 0.0

    def add(self, row: FinishedRow) -> None:
        self.tokens += row.tokens.shape[0]
        self.row_passes += row.passes
        self.accepted += [0] * (len(row.accepted) - len(self.accepted))
        for k, n in enumerate(row.accepted):
            self.accepted[k] += n
        self.total_variation += row.total_variation
        self.nats += row.nats


class Scheduler:
    """Assigns the rows of a prompt to the batch slots of a run, in the prompt's order.

    Args:
        prompt: of all rows; where rows may join, T is the most positions that one may have.
        is_fixed: whether the number of batch slots cannot change during the run. Where rows may
            join, there are then as many from the beginning as the batching allows.
    """

    def __init__(
        self, prompt: Prompt, batching: ContinuousBatching, noise: Noise, is_fixed: bool = False
    ) -> None:
        self.whole = prompt  # of all rows; where rows may join, of those that are still held
        self._noise = noise
        self._on_finish = batching.on_finish
        self._arrivals = batching.arrivals
        self._max_num_seqs = batching.max_num_seqs
        # the row in each batch slot; where it has finished, the last one that was there
        self.rows = list(range(min(batching.max_num_seqs, prompt.batch)))
        self.is_open = [True] * len(self.rows)  # whether the row of each is unfinished
        self.ended: dict[int, FinishedRow] = {}  # by number; empty where rows may join
        self.totals = Totals()
        self._next, self._n_rows = len(self.rows), prompt.batch  # the first that waits, the end
        self._where: dict[int, int] | None = None  # index in `whole` by row; None: its number
        self.is_endless = batching.arrivals is not None  # rows may join
        if self.is_endless and is_fixed:
            n_free = batching.max_num_seqs - len(self.rows)
            self.rows += self.rows[:1] * n_free
            self.is_open += [False] * n_free

    @property
    def n_open(self) -> int:
        """Batch slots whose row is unfinished."""
        return sum(self.is_open)

    @property
    def n_waiting(self) -> int:
        """Rows that no batch slot has had."""
        return self._n_rows - self._next

    @property
    def has_room(self) -> bool:
        """Whether rows may join now."""
        return self.is_endless and not self.n_waiting and self.n_open < self._max_num_seqs

    def prompt(self) -> Prompt:
        """The prompt of the rows in the batch slots."""
        return choose_rows(self.whole, self.indices())

    def noise(self) -> Noise:
        """The noise of the rows in the batch slots, in tensors of its own."""
        return self._noise.rows(self._noise.seeds.new_tensor(self.indices()))

    def indices(self) -> list[int]:
        """The index in `whole` of the row in each batch slot."""
        where = self._where
        return list(self.rows) if where is None else [where[row] for row in self.rows]

    def finish(self, batch_slot: int, ended: FinishedRow) -> None:
        self.is_open[batch_slot] = False
        self.totals.add(ended)
        if not self.is_endless:
            self.ended[ended.row] = ended
        if self._on_finish is not None:
            self._on_finish(ended)

    def receive(self, most: int) -> Arrivals | None:
        """Let up to `most` rows join and wait; `whole` becomes the batch slots' rows and these."""
        assert self._arrivals is not None
        arrived = self._arrivals(most)
        if arrived is None:
            return None
        prompt = arrived.prompt
        self._check(prompt, most)
        kept = choose_rows(self.whole, self.indices())
        pad = self.whole.tokens.shape[1] - prompt.tokens.shape[1]
        tokens = torch.nn.functional.pad(prompt.tokens, (0, pad))
        order = join_order(kept.batch, prompt.batch, prompt.branches, tokens.device)
        self.whole = replace(
            kept,
            tokens=torch.cat([kept.tokens, tokens])[order],
            lengths=torch.cat([kept.lengths, prompt.lengths])[order],
            slots=join_slots(kept.slots, prompt.slots),
        )
        held = self.noise()
        self._noise = Noise(
            torch.cat([held.seeds, arrived.noise.seeds]),
            torch.cat([held.items, arrived.noise.items]),
        )
        numbers = [*self.rows, *range(self._n_rows, self._n_rows + prompt.batch)]
        self._where = {row: k for k, row in enumerate(numbers)}
        self._n_rows += prompt.batch
        return arrived

    def _check(self, prompt: Prompt, most: int) -> None:
        """Refuse rows that do not fit the run."""
        branches = self.whole.branches
        width = self.whole.tokens.shape[1]
        if prompt.is_text is not None or self.whole.is_text is not None:
            raise ShapeError(
                "arrivals: expected prompts of text alone, received one with image tokens; decode "
                "them without arrivals"
            )
        if (
            prompt.branches != branches
            or prompt.tokens.shape[1] > width
            or not 1 <= prompt.batch <= most
        ):
            raise ShapeError(
                f"arrivals: expected 1..{most} rows of {branches} branches with at most {width} "
                f"positions, received {prompt.batch} of {prompt.branches} with "
                f"{prompt.tokens.shape[1]}; keep the others for the next run"
            )

    def admit(self, free: Sequence[int]) -> list[int]:
        """Assign the next waiting rows to free batch slots; the slots that were filled."""
        filled = list(free[: self.n_waiting])
        for batch_slot in filled:
            self.rows[batch_slot], self.is_open[batch_slot] = self._next, True
            self._next += 1
        return filled


def choose_rows(prompt: Prompt, rows: Sequence[int]) -> Prompt:
    """The given rows of a prompt's B, in every branch, as a prompt without continuous batching."""
    index = expand_rows(rows, prompt.batch, prompt.branches, prompt.tokens.device)
    is_text = None if prompt.is_text is None else prompt.is_text[index]
    slots = None if prompt.slots is None else prompt.slots[index[: len(rows)]]
    return replace(
        prompt,
        tokens=prompt.tokens[index],
        lengths=prompt.lengths[index],
        batching=None,
        is_text=is_text,
        slots=slots,
    )


def expand_rows(
    rows: Sequence[int], batch: int, branches: int, device: torch.device | str
) -> Tensor:
    """Row numbers among B as row numbers among the R rows of a pass, `[G * n]` int64."""
    chosen = torch.tensor(list(rows), dtype=torch.int64, device=device)
    return torch.cat([chosen + branch * batch for branch in range(branches)])


def join_order(first: int, second: int, branches: int, device: torch.device | str) -> Tensor:
    """The order `[G * (first + second)]` int64 that makes two concatenated batches one."""
    index = torch.arange(branches * (first + second), device=device)
    one = index[: branches * first]
    other = index[branches * first :]
    return torch.cat([one.view(branches, first), other.view(branches, second)], 1).flatten()


def join_slots(kept: Tensor | None, joining: Tensor | None) -> Tensor | None:
    """Slots of rows `[B]` of two prompts of one model, which both have them or not."""
    return None if kept is None or joining is None else torch.cat([kept, joining])
