"""Scheduler: which rows of a long prompt occupy the batch slots of a run, and which rows wait.

Window runs and canvas runs share this class; see `mmaccel.contracts.ContinuousBatching`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmaccel.contracts import ContinuousBatching, FinishedRow, Prompt
from mmaccel.samplers.noise import Noise


class Scheduler:
    """Assigns the rows of a prompt to the batch slots of a run, in the prompt's order.

    Args:
        prompt: of all rows.
        batching: how many batch slots there are.
        noise: of all rows.

    Attributes:
        whole: the prompt of all rows.
        rows: the row in each batch slot; where it has finished, the last one that was there.
        is_open: whether the row of each batch slot is unfinished.
        ended: finished rows, by their number.
    """

    def __init__(self, prompt: Prompt, batching: ContinuousBatching, noise: Noise) -> None:
        self.whole, self._noise, self._on_finish = prompt, noise, batching.on_finish
        self.rows = list(range(min(batching.max_num_seqs, prompt.batch)))
        self.is_open = [True] * len(self.rows)
        self.ended: dict[int, FinishedRow] = {}
        self._next = len(self.rows)

    @property
    def n_open(self) -> int:
        """Number of batch slots whose row is unfinished."""
        return sum(self.is_open)

    def prompt(self) -> Prompt:
        """The prompt of the rows in the batch slots."""
        return choose_rows(self.whole, self.rows)

    def noise(self) -> Noise:
        """The noise of the rows in the batch slots, in tensors of its own."""
        return self._noise.rows(torch.tensor(self.rows, device=self._noise.seeds.device))

    def finish(self, batch_slot: int, ended: FinishedRow) -> None:
        """Record the finished row of a batch slot and call `on_finish` with it."""
        self.is_open[batch_slot] = False
        self.ended[ended.row] = ended
        if self._on_finish is not None:
            self._on_finish(ended)

    def admit(self, free: Sequence[int]) -> list[int]:
        """Assign the next waiting rows to free batch slots; returns the slots that were filled."""
        filled = list(free[: self.whole.batch - self._next])
        for batch_slot in filled:
            self.rows[batch_slot], self.is_open[batch_slot] = self._next, True
            self._next += 1
        return filled


def choose_rows(prompt: Prompt, rows: Sequence[int]) -> Prompt:
    """The given rows of a prompt's B, in every branch, as a prompt without continuous batching."""
    index = expand_rows(rows, prompt.batch, prompt.branches, prompt.tokens.device)
    is_text = None if prompt.is_text is None else prompt.is_text[index]
    return replace(
        prompt,
        tokens=prompt.tokens[index],
        lengths=prompt.lengths[index],
        batching=None,
        is_text=is_text,
    )


def expand_rows(
    rows: Sequence[int], batch: int, branches: int, device: torch.device | str
) -> Tensor:
    """Row numbers among B as row numbers among the R rows of a pass, `[G * n]` int64."""
    chosen = torch.tensor(list(rows), dtype=torch.int64, device=device)
    return torch.cat([chosen + branch * batch for branch in range(branches)])
