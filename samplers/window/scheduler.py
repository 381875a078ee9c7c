"""WindowScheduler: which rows of a long prompt stand in the places of a run, and who comes next.

The host's side of `mmaccel.contracts.ContinuousBatching`. When rows have ended they are handed out, the next ones
of the prompt take their places, and the prompts of the newcomers alone are fed. Where nobody is
left to come, the places of ended rows are taken out of the run, unless its passes are recorded.
A row's tokens do not depend on whose place it takes: everything of its own begins anew with it.

Newcomers: how a model in mid-run is fed the prompts of rows that take others' places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from mmaccel.contracts import ContinuousBatching, Prompt, TokenModel
from mmaccel.results import Stats
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.scheduling import Scheduler, spread_rows
from mmaccel.samplers.window.counters import count_gains

if TYPE_CHECKING:
    from mmaccel.samplers.window.run import WindowPass


@runtime_checkable
class SupportsContinuousBatching(Protocol):
    """A token model whose rows can be fed, chosen and left out by themselves.

    Another one keeps its places to the end, and a newcomer's prompt is fed in a pass of all rows.
    """

    def offered(self) -> Any:
        """What is given for the rows of the next run, in the order of its prompt."""

    def seat(self, offered: Any, rows: Tensor | None) -> None:
        """From now on the model's rows are these of what was offered, `[R]` int64; None: all."""

    def prefill_rows(self, tokens: Tensor, start: Tensor, rows: Tensor) -> None:
        """`feed` tokens `[n, W]` to some of its rows, `[n]` int64."""

    def keep_rows(self, rows: Tensor) -> None:
        """Leave out all rows but these, `[n]` int64; `seat` is owed afterwards."""


def prefill_admitted(model: TokenModel, run: WindowPass, rows: Tensor, width: int) -> int:
    """Feed the prompts of newcomers without their last tokens.

    Args:
        model: whose rows are those of the run.
        run: in which they stand in their places already.
        rows: `[n]` int64, theirs among the R rows of a pass.
        width: tokens of each, at least 1.

    Returns:
        Entries that went through the model.
    """
    prompt = run.prompt
    tokens = prompt.tokens[:, :width].clamp(min=0)  # [R, width]
    start = prompt.lengths.new_zeros(1)
    if isinstance(model, SupportsContinuousBatching):
        model.prefill_rows(tokens[rows], start.expand(len(rows)), rows)
        return len(rows) * width
    # what others are fed stands where their next pass begins, and is written over by it
    start = prompt.lengths - 1 + run.made.repeat(prompt.branches)
    start = start.index_fill(0, rows, 0)
    model.prefill(tokens, start)
    return tokens.numel()


class WindowScheduler(Scheduler):
    """Rows of a prompt in a window's places; the same arguments as `Scheduler`."""

    def __init__(self, prompt: Prompt, places: ContinuousBatching, noise: Noise) -> None:
        super().__init__(prompt, places, noise)
        self._models: list[tuple[TokenModel, Any]] = []

    def join(self, model: TokenModel) -> None:
        """From now on a model's rows are those of the places."""
        offered = model.offered() if isinstance(model, SupportsContinuousBatching) else None
        self._models.append((model, offered))
        self._seat()

    def leave(self) -> None:
        """Give models back what they were given."""
        for model, offered in self._models:
            if isinstance(model, SupportsContinuousBatching):
                model.seat(offered, None)

    def refill(self, run: WindowPass) -> int:
        """Hand out rows that have ended, and let others take their places.

        Returns:
            Rows that were admitted.
        """
        ended = run.ended()
        free = [place for place, is_open in enumerate(self.is_open) if is_open and ended[place]]
        for place in free:
            self.finish(place, run.row(place, self.rows[place]))
        taken = self.fill(free)
        if taken:
            self._admit(run, taken)
        if 0 < self.n_open < len(self.rows) and self._can_shrink(run):
            self._shrink(run)
        return len(taken)

    def report(self, stats: Stats, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Fill in statistics of all rows.

        Returns:
            Tokens `[B, length]`, lengths `[B]` and passes `[B]` of all rows of the prompt, int64.
        """
        ended = [self.ended[row] for row in range(self.whole.batch)]
        tokens = self.whole.tokens.new_zeros(len(ended), length)
        for own, row in zip(tokens, ended):
            own[: row.tokens.shape[0]] = row.tokens
        made = [row.tokens.shape[0] for row in ended]
        passes = [row.passes for row in ended]
        gains = [k + 1 for row in ended for k, n in enumerate(row.accepted) for _ in range(n)]
        stats.accepted, stats.tokens, stats.row_passes = count_gains(gains), sum(made), sum(passes)
        stats.total_variation = sum(row.total_variation for row in ended)
        return tokens, tokens.new_tensor(made), tokens.new_tensor(passes)

    def _admit(self, run: WindowPass, taken: list[int]) -> None:
        prompt, device = self.prompt(), run.made.device
        run.restart(torch.tensor(taken, device=device), prompt)
        run.noise.refill(self.noise())
        self._seat()
        rows = spread_rows(taken, len(self.rows), prompt.branches, device)
        width = int(prompt.lengths[rows].max()) - 1
        if not width:
            return
        for model, _ in self._models:
            n_fed = prefill_admitted(model, run, rows, width)
            if model is run.model:
                run.stats.prefill_passes += 1
                run.stats.tokens_processed += n_fed
            else:
                run.stats.draft_passes += 1

    def _can_shrink(self, run: WindowPass) -> bool:
        is_captured = run.runner.is_static  # whose tensors have to stay where they are
        return not is_captured and all(
            isinstance(model, SupportsContinuousBatching) for model, _ in self._models
        )

    def _shrink(self, run: WindowPass) -> None:
        kept = [place for place, is_open in enumerate(self.is_open) if is_open]
        batch, device = len(self.rows), run.made.device
        self.rows, self.is_open = [self.rows[place] for place in kept], [True] * len(kept)
        prompt = self.prompt()
        run.keep(torch.tensor(kept, device=device), prompt)
        rows = spread_rows(kept, batch, prompt.branches, device)
        for model, _ in self._models:
            assert isinstance(model, SupportsContinuousBatching)
            model.keep_rows(rows)
        self._seat()

    def _seat(self) -> None:
        whole = self.whole
        rows = spread_rows(self.rows, whole.batch, whole.branches, whole.tokens.device)
        for model, offered in self._models:
            if isinstance(model, SupportsContinuousBatching):
                model.seat(offered, rows)
