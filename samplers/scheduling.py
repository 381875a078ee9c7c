"""The plan of seats: which rows of a long prompt stand in the places of a run, and who is next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmaccel.contracts import ContinuousBatching, FinishedRow, Prompt
from mmaccel.samplers.noise import Noise


class Scheduler:
    """Rows of a prompt in a run's places, in their order.

    Args:
        prompt: of all rows.
        places: how many stand there at a time.
        noise: of all rows.

    Attributes:
        whole: the prompt of all rows.
        rows: which row stands in each place; the last one to stand there, where it has ended.
        is_open: whether the row of each place has not ended.
        ended: rows that have, by their number.
    """

    def __init__(self, prompt: Prompt, batching: ContinuousBatching, noise: Noise) -> None:
        self.whole, self._noise, self._deliver = prompt, noise, batching.on_finish
        self.rows = list(range(min(batching.max_num_seqs, prompt.batch)))
        self.is_open = [True] * len(self.rows)
        self.ended: dict[int, FinishedRow] = {}
        self._next = len(self.rows)

    @property
    def n_open(self) -> int:
        """Places whose row has not ended."""
        return sum(self.is_open)

    def prompt(self) -> Prompt:
        """Of the rows that stand in the places."""
        return choose_rows(self.whole, self.rows)

    def noise(self) -> Noise:
        """Of the rows that stand in the places."""
        return self._noise.rows(torch.tensor(self.rows, device=self._noise.seeds.device))

    def finish(self, place: int, ended: FinishedRow) -> None:
        """The row of a place has ended."""
        self.is_open[place] = False
        self.ended[ended.row] = ended
        if self._deliver is not None:
            self._deliver(ended)

    def fill(self, free: Sequence[int]) -> list[int]:
        """Let the next rows take free places; returns those that were taken."""
        taken = list(free[: self.whole.batch - self._next])
        for place in taken:
            self.rows[place], self.is_open[place] = self._next, True
            self._next += 1
        return taken


def choose_rows(prompt: Prompt, rows: Sequence[int]) -> Prompt:
    """Some of a prompt's B rows, branch by branch, as a prompt without places of its own."""
    index = spread_rows(rows, prompt.batch, prompt.branches, prompt.tokens.device)
    return replace(
        prompt, tokens=prompt.tokens[index], lengths=prompt.lengths[index], batching=None
    )


def spread_rows(
    rows: Sequence[int], batch: int, branches: int, device: torch.device | str
) -> Tensor:
    """Rows out of B as rows of a pass of all branches, `[G * n]` int64."""
    chosen = torch.tensor(list(rows), dtype=torch.int64, device=device)
    return torch.cat([chosen + branch * batch for branch in range(branches)])
