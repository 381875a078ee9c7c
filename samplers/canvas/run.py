"""A run over a canvas: forward pass, choice of slots by the policy, commit, until no slot is open.

S. Nie et al., "Large Language Diffusion Models", 2025, arXiv 2502.09992, algorithm 5 (masked
diffusion; instead of remasking, slots that are not committed are never unmasked), and M. Arriola et
al., "Block Diffusion", 2025, arXiv 2503.09573, algorithm 2 (blocks), as one loop.

Continuous batching (`mmaccel.contracts.ContinuousBatching`): between two passes, rows without an
open slot are handed out, and the next rows of the prompt begin in their batch slots. Where rows may
join the run, it has all its batch slots from the beginning; passes leave out those without a row.

Departures: everything is per row, so that a row's result does not depend on its batch; at least one
slot of every open row is committed per pass; noise is frozen per slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from mmaccel.checks import check_answer
from mmaccel.contracts import Denoiser, FinishedRow, Prompt
from mmaccel.policies import CanvasInterrupt, CanvasProgress, OnCanvasStep
from mmaccel.results import Generation, Stats
from mmaccel.samplers.canvas.cache_plan import as_plan
from mmaccel.samplers.canvas.checks import check_run
from mmaccel.samplers.canvas.model_pass import ModelPass
from mmaccel.samplers.canvas.orders import Order, make_order
from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.canvas.state import PER_ROW, Canvas
from mmaccel.samplers.checks import check_limit, invalid_logits
from mmaccel.samplers.divergence import DivergenceBound, bound_nats
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.scheduling import Scheduler
from mmaccel.samplers.window.rows import count_gains

if TYPE_CHECKING:
    from mmaccel.samplers.canvas.policy import RunPolicy
    from mmaccel.samplers.canvas.revision import Reviser


class RowState(Protocol):
    """State that is kept per row of a run."""

    def restart(self, batch_slots: Tensor) -> None:
        """Forget the rows of `batch_slots`, `[n]` int64: other rows begin there."""


class CanvasRun:
    """One run of B rows (R = G * B of the prompt) over L slots; a pass computes at most `copies`
    canvases, as "rows" of a batch or "entries" of one row (`layout`).
    """

    def __init__(
        self,
        policy: RunPolicy,
        model: Denoiser,
        prompt: Prompt,
        length: int,
        *,
        params: SamplingParams,
        noise: Noise,
        on_step: OnCanvasStep | None = None,
        copies: int = 1,
        layout: str = "rows",
        pass_type: type[ModelPass] = ModelPass,
    ) -> None:
        self._began = time.perf_counter()
        check_run(policy, model, prompt, length, params, noise)
        self.scheduler = None  # which rows are in the batch slots, where not all are all the time
        if prompt.batching is not None:
            self.scheduler = Scheduler(prompt, prompt.batching, noise, is_fixed=True)
            prompt = self.scheduler.prompt()
            noise = self.scheduler.noise()
        self.on_step = on_step
        self.noise = noise  # of the rows in the batch slots
        self.layout = prompt.layout
        # replaces what a pass has drawn, for proofs that enumerate all draws
        self.draws: Callable[[SlotPredictions], SlotPredictions] | None = None
        self.reviser: Reviser | None = None  # changes the canvas after every commit
        self.stats = Stats(
            policy=repr(policy), exactness=policy.exactness, branches=prompt.branches
        )
        block = model.block if policy.block is None else policy.block
        self._blank = partial(
            Canvas,
            length=length,
            mask_token=model.mask_token,
            block=block,
            is_own=model.block is not None,
            lengths=model.lengths,
        )
        self.canvas = self._blank(prompt)  # what is committed
        if self.scheduler is not None:  # a batch slot may wait for its first row
            is_open = torch.tensor(
                self.scheduler.is_open, device=prompt.tokens.device, dtype=torch.bool
            )
            self.canvas.cut(self.canvas.limit * is_open)
            self.canvas.update_blocks()
        self.bound = DivergenceBound(prompt.batch, prompt.tokens.device)  # what that cost
        self.has_new_rows = False  # there are rows without a pass while others go on
        self._row_states: list[RowState] = []
        self._reported = self.canvas.lengths  # [B], slots that `on_step` has received
        self._is_invalid = torch.zeros_like(self.canvas.stays_in_block)  # [B]
        width = length if block is None else min(block, length)
        if model.lengths is not None:
            width = max(model.lengths)
        self.model_pass = pass_type(
            model, prompt, self.canvas, width, params, noise, as_plan(policy.cache), copies, layout
        )
        self.stats.prefill_passes += self.model_pass.n_prefilled > 0

    def track(self, state: RowState) -> None:
        """From now on restart `state` whenever other rows begin in batch slots."""
        self._row_states.append(state)

    def order(self, name: str) -> Order:
        """An order of the rows in the batch slots; it follows when rows change."""
        order = make_order(name, self.canvas.length, self.noise, self.layout)
        self.track(order)
        return order

    def sync(self) -> bool:
        """Hand out ended rows, admit the next; if a slot is open. Cost: a host synchronisation."""
        is_live, is_invalid = torch.stack([self.canvas.is_live, self._is_invalid]).tolist()
        if any(is_invalid):
            rows = [k for k, is_one in enumerate(is_invalid) if is_one]
            if self.scheduler is not None:
                rows = [self.scheduler.rows[k] for k in rows]
            raise invalid_logits(tuple(rows), "layout")
        if self.scheduler is not None:
            is_live = self._refill(self.scheduler, is_live)
        self.model_pass.choose_live_rows(is_live)
        return any(is_live)

    def _refill(self, scheduler: Scheduler, is_live: list[bool]) -> list[bool]:
        """Hand out ended rows and admit others; which batch slots hold a live row."""
        while True:  # an admitted row may have nothing open: its layout forces all slots
            free = [k for k, is_one in enumerate(scheduler.is_open) if is_one and not is_live[k]]
            for batch_slot in free:
                scheduler.finish(batch_slot, self._finished_row(batch_slot, scheduler))
            if scheduler.has_room:
                scheduler.receive(len(is_live) - scheduler.n_open)
            taken = scheduler.admit([k for k, is_one in enumerate(scheduler.is_open) if not is_one])
            if not taken:
                return is_live
            self._restart(self.canvas.tokens.new_tensor(taken), scheduler)
            if scheduler.is_endless:
                self.bound.forget([k for k, is_one in enumerate(scheduler.is_open) if is_one])
            is_live = self.canvas.is_live.tolist()

    def _finished_row(self, batch_slot: int, scheduler: Scheduler) -> FinishedRow:
        tokens = self.canvas.tokens[batch_slot, : int(self.canvas.limit[batch_slot])].clone()
        gains, passes, nats = self.bound.row(batch_slot)
        row = scheduler.rows[batch_slot]
        return FinishedRow(row, tokens, passes, count_gains(gains), 0.0, nats)

    def _restart(self, batch_slots: Tensor, scheduler: Scheduler) -> None:
        prompt = scheduler.prompt()
        self.noise.refill(scheduler.noise())
        fresh = self._blank(prompt)
        for name in PER_ROW:
            new = getattr(fresh, name)[batch_slots]
            setattr(self.canvas, name, getattr(self.canvas, name).index_copy(0, batch_slots, new))
        self._reported = self._reported.index_copy(0, batch_slots, fresh.lengths[batch_slots])
        self.bound.restart(batch_slots)
        self.model_pass.restart(batch_slots, prompt)
        for state in self._row_states:
            state.restart(batch_slots)
        self.has_new_rows = True

    def forward(self) -> SlotPredictions:
        """One pass over the canvas; predictions `[B, Q]` of the active block."""
        self.has_new_rows = False
        predictions, n_entries = self.model_pass.forward(self.canvas, 1)
        self.bound.count_pass(n_entries, self.model_pass.n_rows)
        return predictions if self.draws is None else self.draws(predictions)

    def commit(self, predictions: SlotPredictions, chosen: Tensor) -> None:
        """Commit drawn tokens of chosen slots `[B, Q]`, one a row at least, and finish the pass."""
        name = f"{self.stats.policy}: the slots to commit"
        check_answer(name, chosen, predictions.is_open.shape, "bool")
        chosen = predictions.at_least_one(chosen)
        assert predictions.drawn is not None
        was_open, before = self.canvas.is_live, self.canvas.is_committed
        self.mark_invalid(predictions.has_invalid_logits & was_open)
        n_new = self.commit_on(self.canvas, chosen, predictions.drawn)
        self.bound.charge(n_new, bound_nats(predictions.entropy, chosen), was_open)
        if self.reviser is not None:
            new = (self.canvas.is_committed & ~before).gather(1, predictions.slots)
            self.reviser.revise(predictions, new & (self.slots < self.canvas.end[:, None]))
        self.finish_pass()

    @property
    def slots(self) -> Tensor:
        """`[B, Q]` int64, slots from the active block's first on; L and above are none."""
        return self.model_pass.slots(self.canvas)

    def commit_on(self, canvas: Canvas, chosen: Tensor, tokens: Tensor) -> Tensor:
        """Commit `tokens` where `chosen`, `[n * B, Q]` both; returns how many slots, `[n * B]`."""
        slots = self.model_pass.slots(canvas)
        n_new = canvas.commit(canvas.spread(slots, chosen, False), canvas.spread(slots, tokens, 0))
        canvas.cut_at_stop_tokens()
        return n_new

    def mark_invalid(self, rows: Tensor) -> None:
        """Let the next `sync` fail for these rows, `[B]` bool."""
        self._is_invalid = self._is_invalid | rows

    def finish_pass(self) -> None:
        """Apply stop tokens, go on from full blocks, and call `on_step`."""
        self._update_blocks()
        if self.on_step is None or bool(self._is_invalid.any()):
            return
        canvas = self.canvas
        lengths = self.canvas.lengths
        progress = CanvasProgress(
            canvas.tokens.clone(),
            canvas.is_committed.clone(),
            lengths,
            self._reported,
            self.bound.passes,
            self.bound.nats.clone(),
            None if self.scheduler is None else tuple(self.scheduler.rows),
        )
        self._reported = lengths
        limit = self.on_step(progress)
        if limit is not None:
            canvas.cut(check_limit(limit, canvas.limit))
            self._update_blocks()

    def _update_blocks(self) -> None:
        is_new = self.canvas.update_blocks()
        self.model_pass.begin_blocks(is_new & self.canvas.is_live)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Turn a KeyboardInterrupt into a CanvasInterrupt, which carries what was committed."""
        try:
            yield
        except KeyboardInterrupt as stop:
            raise CanvasInterrupt(*self._result()) from stop

    def generation(self) -> Generation:
        return self._result()[0]

    def _result(self) -> tuple[Generation, Tensor]:
        """The result of all rows, also of those never admitted, and what of it is committed."""
        canvas, stats, scheduler = self.canvas, self.stats, self.scheduler
        tokens = torch.where(canvas.slots < canvas.limit[:, None], canvas.tokens, 0)
        lengths, is_committed = canvas.limit.clone(), canvas.is_committed
        passes = self.bound.report(stats, canvas.lengths)
        if scheduler is not None and scheduler.is_endless:  # `on_finish` has had them
            totals = scheduler.totals
            stats.tokens, stats.accepted = totals.tokens, totals.accepted
            stats.row_passes, stats.nats = totals.row_passes, totals.nats
            tokens, lengths, passes = tokens[:0], lengths[:0], lengths[:0]
            is_committed = is_committed[:0]
        elif scheduler is not None:
            batch_slots = [k for k, is_one in enumerate(scheduler.is_open) if is_one]
            rows = lengths.new_tensor([scheduler.rows[k] for k in batch_slots])
            open_slots = lengths.new_tensor(batch_slots)
            whole = self._blank(scheduler.whole)
            of_all = whole.tokens, whole.limit, torch.zeros_like(whole.limit), whole.is_committed
            of_open = tokens, lengths, passes, is_committed
            tokens, lengths, passes, is_committed = (
                every.index_copy(0, rows, some[open_slots])
                for every, some in zip(of_all, of_open, strict=True)
            )
            stats.tokens = int(canvas.lengths[open_slots].sum())
            for row, ended in scheduler.ended.items():
                lengths[row], passes[row] = len(ended.tokens), ended.passes
                tokens[row] = 0
                tokens[row, : len(ended.tokens)] = ended.tokens
                is_committed[row] = canvas.slots < len(ended.tokens)
                stats.tokens += len(ended.tokens)
        stats.positions += self.model_pass.n_prefilled
        stats.use_dtype(self.model_pass.formats.name)
        stats.forward_seconds = self.model_pass.seconds
        stats.seconds = time.perf_counter() - self._began
        return Generation(tokens, lengths, passes, stats), is_committed
