"""WindowScheduler: continuous batching of a window run.

When rows have ended, the scheduler reports them, admits the next rows of the prompt into their
batch slots and prefills the prompts of the admitted rows alone. When no row waits any more, the
batch slots of ended rows are dropped from the run, unless its steps are captured. Where rows may
join the run, as those of a server do, batch slots are added for them in the same way. A row's
tokens do not depend on the batch slot it is admitted to, because all state of the slot begins anew
with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from mmaccel.contracts import ContinuousBatching, Pass, Prompt, TokenModel
from mmaccel.results import Stats
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.scheduling import Scheduler, expand_rows, join_order
from mmaccel.samplers.window.step_runner import StepRunner

if TYPE_CHECKING:
    from mmaccel.samplers.window.rows import RunRows, TokenBuffer


class RefilledRun(Protocol):
    """A window run whose rows are admitted and dropped; see `WindowRun`."""

    model: TokenModel
    prompt: Prompt
    rows: RunRows
    buffer: TokenBuffer
    runner: StepRunner
    stats: Stats

    def restart(self, batch_slots: Tensor, prompt: Prompt, noise: Noise) -> None:
        """Begin anew in some batch slots `[n]` int64, whose prompts the caller prefills."""

    def keep_rows(self, batch_slots: Tensor, prompt: Prompt) -> None:
        """Go on with these batch slots, `[n]` int64; `prompt` is theirs."""


@runtime_checkable
class SupportsContinuousBatching(Protocol):
    """A token model whose rows can be prefilled, selected and dropped one by one.

    Any other model keeps all its rows until the run ends, and the prompt of an admitted row is
    prefilled in a pass of all rows.
    """

    def get_row_inputs(self) -> Any:
        """The model's inputs that have one entry for each row of the next run's prompt."""

    def select_rows(self, row_inputs: Any, rows: Tensor | None) -> None:
        """From now on the model's rows are `rows` `[R]` int64 of `row_inputs`; None: all."""

    def prefill_rows(self, tokens: Tensor, start: Tensor, rows: Tensor) -> None:
        """`prefill` tokens `[n, W]` to some of its rows, `[n]` int64."""

    def keep_rows(self, rows: Tensor) -> None:
        """From now on the cache holds these of its rows, `[n]` int64; `select_rows` follows.

        A row that stands there again is a place for a row that is prefilled next.
        """

    def join_rows(self, row_inputs: Any, others: Any, rows: Tensor, order: Tensor) -> Any:
        """Row inputs of rows that a run has, and of others that join it.

        Args:
            row_inputs: of the run, from `get_row_inputs`.
            others: of the rows that join, from there too.
            rows: `[n]` int64, those of the run that stay.
            order: `[R]` int64, the order of the concatenation of both.
        """


class WindowScheduler(Scheduler):
    """Assigns the rows of a prompt to the batch slots of a window run; see `Scheduler`."""

    def __init__(
        self, prompt: Prompt, batching: ContinuousBatching, noise: Noise, is_fixed: bool = False
    ) -> None:
        super().__init__(prompt, batching, noise, is_fixed)
        self._models: list[tuple[TokenModel, Any]] = []

    def register(self, model: TokenModel) -> None:
        """From now on the model's rows are those in the batch slots."""
        inputs = model.get_row_inputs() if isinstance(model, SupportsContinuousBatching) else None
        self._models.append((model, inputs))
        self._select_rows()

    def release_models(self) -> None:
        """Restore the row inputs that every registered model had before the run."""
        for model, inputs in self._models:
            if isinstance(model, SupportsContinuousBatching):
                model.select_rows(inputs, None)

    def refill(self, run: RefilledRun) -> int:
        """Finish the rows that have ended and admit others into their batch slots.

        Returns:
            How many rows were admitted.
        """
        ended = run.rows.ended.tolist()
        for batch_slot, is_open in enumerate(self.is_open):
            if is_open and ended[batch_slot]:
                self.finish(batch_slot, run.rows.finished_row(batch_slot, self.rows[batch_slot]))
        if self.has_room:
            self._receive(run)
        free = [k for k, is_open in enumerate(self.is_open) if not is_open]
        filled = self.admit(free)
        if filled:
            self._prefill(run, filled)
        if 0 < self.n_open < len(self.rows) and self._can_resize(run):
            self._keep(run, [k for k, is_open in enumerate(self.is_open) if is_open])
        return len(filled)

    def report(self, stats: Stats, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Fill in the statistics of all rows.

        Returns:
            Tokens `[B, length]`, lengths `[B]` and passes `[B]` of all rows of the prompt, int64.
        """
        totals = self.totals
        stats.accepted = totals.accepted
        stats.tokens = totals.tokens
        stats.row_passes = totals.row_passes
        stats.total_variation = totals.total_variation
        ended = [self.ended[row] for row in range(len(self.ended))]
        tokens = self.whole.tokens.new_zeros(len(ended), length)
        for own, row in zip(tokens, ended):
            own[: row.tokens.shape[0]] = row.tokens
        lengths = [row.tokens.shape[0] for row in ended]
        passes = [row.passes for row in ended]
        return tokens, tokens.new_tensor(lengths), tokens.new_tensor(passes)

    def _receive(self, run: RefilledRun) -> None:
        """Let rows join, with batch slots for them."""
        can_resize = self._can_resize(run)
        n_slots = len(self.rows)
        most = (self._max_num_seqs if can_resize else n_slots) - self.n_open
        before = [
            model.get_row_inputs() if isinstance(model, SupportsContinuousBatching) else None
            for model, _ in self._models
        ]
        places = expand_rows(
            self.indices(), self.whole.batch, self.whole.branches, self.whole.tokens.device
        )
        arrived = self.receive(most) if most else None
        if arrived is None:
            return
        order = join_order(n_slots, arrived.prompt.batch, self.whole.branches, places.device)
        for k, (model, inputs) in enumerate(self._models):
            if isinstance(model, SupportsContinuousBatching):
                joined = model.join_rows(inputs, model.get_row_inputs(), places, order)
                model.select_rows(before[k], None)  # captured steps read these very tensors
                self._models[k] = model, joined
        n_more = self.n_waiting - (n_slots - self.n_open)
        if n_more > 0:
            self._keep(run, [*range(n_slots), *[0] * n_more])

    def _prefill(self, run: RefilledRun, filled: list[int]) -> None:
        """Begin anew in the filled batch slots and prefill their prompts without the last token."""
        prompt = self.prompt()
        device = run.buffer.tokens.device
        run.restart(torch.tensor(filled, device=device), prompt, self.noise())
        self._select_rows()
        rows = expand_rows(filled, len(self.rows), prompt.branches, device)
        width = int(prompt.lengths[rows].max()) - 1
        if not width:
            return
        for model, _ in self._models:
            n_processed = _prefill_rows(model, run, rows, width)
            if model is run.model:
                run.stats.prefill_passes += 1
                run.stats.tokens_processed += n_processed
            else:
                run.stats.draft_passes += 1

    def _can_resize(self, run: RefilledRun) -> bool:
        return not run.runner.is_static and all(
            isinstance(model, SupportsContinuousBatching) for model, _ in self._models
        )

    def _keep(self, run: RefilledRun, batch_slots: list[int]) -> None:
        """Go on with these batch slots; one that stands there again is a free one."""
        device = run.buffer.tokens.device
        batch = run.prompt.batch
        self.rows = [self.rows[k] for k in batch_slots]
        self.is_open = [
            self.is_open[k] and k not in batch_slots[:n] for n, k in enumerate(batch_slots)
        ]
        prompt = self.prompt()
        run.keep_rows(torch.tensor(batch_slots, device=device), prompt)
        rows = expand_rows(batch_slots, batch, prompt.branches, device)
        for model, _ in self._models:
            assert isinstance(model, SupportsContinuousBatching)
            model.keep_rows(rows)
        self._select_rows()

    def _select_rows(self) -> None:
        whole = self.whole
        rows = expand_rows(self.indices(), whole.batch, whole.branches, whole.tokens.device)
        for model, inputs in self._models:
            if isinstance(model, SupportsContinuousBatching):
                model.select_rows(inputs, rows)


def open_scheduler(
    batching: ContinuousBatching,
    runner: StepRunner,
    model: TokenModel,
    prompt: Prompt,
    noise: Noise,
) -> WindowScheduler:
    """The scheduler of a run with continuous batching."""
    is_fixed = runner.is_static or not isinstance(model, SupportsContinuousBatching)
    return WindowScheduler(prompt, batching, noise, is_fixed)


def _prefill_rows(model: TokenModel, run: RefilledRun, rows: Tensor, width: int) -> int:
    """Prefill the prompts of admitted rows, without their last tokens.

    Args:
        model: a model whose rows are those of the run.
        run: the run in whose batch slots the rows are already.
        rows: `[n]` int64, the admitted rows among the R rows of a pass.
        width: tokens of each, at least 1.

    Returns:
        How many tokens the model processed.
    """
    prompt = run.prompt
    tokens = prompt.tokens[:, :width].clamp(min=0)  # [R, width]
    start = prompt.lengths.new_zeros(1)
    if isinstance(model, SupportsContinuousBatching):
        model.prefill_rows(tokens[rows], start.expand(len(rows)), rows)
        return len(rows) * width
    # The other rows process these tokens where their next pass begins, which overwrites them.
    start = run.rows.next_positions().index_fill(0, rows, 0)
    model.prefill(Pass(tokens, start))
    return tokens.numel()
