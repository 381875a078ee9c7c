"""A run over a canvas: look, let a policy choose, commit, until nothing is open.

S. Nie et al., "Large Language Diffusion Models", 2025, arXiv 2502.09992, algorithm 5 (masked
diffusion, remasking turned round: what is not committed was never unmasked), and M. Arriola et al.,
"Block Diffusion", 2025, arXiv 2503.09573, algorithm 2 (blocks), as one loop.

Departures: everything is per row, so that a row's result does not depend on its batch; at least one
slot of every open row is committed per pass; noise is frozen per slot.

Rows of a canvas run: which stand in its places, who comes next, and what became of them all.

The canvas's side of `mmaccel.contracts.ContinuousBatching`: between two passes, rows without an open slot are
handed out and the next ones of the prompt begin in their places with everything anew. What is kept
per row beside the canvas (memories, revisers, orders) is told so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from mmaccel.canvas_contracts import (
    CanvasInterrupt,
    CanvasPolicy,
    CanvasProgress,
    Denoiser,
    OnCanvasStep,
)
from mmaccel.contracts import FinishedRow, Layout, Prompt
from mmaccel.results import Generation, Stats
from mmaccel.samplers.canvas.cache_plan import CachePlan
from mmaccel.samplers.canvas.checks import check_leaks, check_run
from mmaccel.samplers.canvas.divergence import DivergenceBound, bound_nats
from mmaccel.samplers.canvas.model_pass import CanvasLook, live_rows
from mmaccel.samplers.canvas.orders import Order, make_order
from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.canvas.state import PER_ROW, Canvas
from mmaccel.samplers.checks import check_limit, invalid_logits
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.scheduling import Scheduler
from mmaccel.samplers.window.counters import count_gains


class RowState(Protocol):
    """Something that is kept per row of a run."""

    def restart(self, places: Tensor) -> None:
        """Forget the rows of some places, `[n]` int64; others begin there."""


class CanvasRows:
    """What a run is between its passes.

    Attributes:
        canvas: what is committed.
        ledger: what it cost.
        noise, layout: of the rows in the places, for orders.
        seats: who stands in the places; None where all rows do.
        is_new: whether there are rows that no pass has looked at, though others go on.
    """

    canvas: Canvas
    ledger: DivergenceBound
    noise: Noise
    layout: Layout | None
    scheduler: Scheduler | None
    stats: Stats
    is_new = False

    _states: Sequence[RowState] = ()
    _began: float
    _told: Tensor  # [B], slots that `on_step` was told of
    _is_bad: Tensor  # [B]
    _eyes: CanvasLook
    _blank: Callable[[Prompt], Canvas]

    def keep(self, state: RowState) -> None:
        """From now on it is told when rows take the places of others."""
        self._states = [*self._states, state]

    def order(self, name: str) -> Order:
        """An order of the rows that stand in the places, whichever these are."""
        order = make_order(name, self.canvas.length, self.noise, self.layout)
        self.keep(order)
        return order

    @property
    def live(self) -> Tensor | None:
        """`[n]` int64, rows that the last pass was of; None: all."""
        return self._eyes.live

    @property
    def is_open(self) -> bool:
        """Whether any slot is still to be committed. Cost: one host synchronisation.

        Raises:
            NumericsError: a slot that was to be chosen or left had no law.
        """
        is_live, is_bad = torch.stack([self.canvas.is_live, self._is_bad]).tolist()
        if any(is_bad):
            places = [place for place, is_one in enumerate(is_bad) if is_one]
            rows = places if self.scheduler is None else [self.scheduler.rows[k] for k in places]
            raise invalid_logits(tuple(rows), "layout")
        if self.scheduler is not None:
            is_live = self._turn_over(self.scheduler, is_live)
        eyes, device = self._eyes, self.canvas.tokens.device
        eyes.live = None if eyes.by_entry else live_rows(eyes.model, is_live, device)
        return any(is_live)

    def _turn_over(self, scheduler: Scheduler, is_live: list[bool]) -> list[bool]:
        """Hand out rows that have ended, and let others take their places; returns which places
        hold a row that has not.
        """
        while True:  # a newcomer may have nothing open: its layout gives it all
            free = [k for k, is_one in enumerate(scheduler.is_open) if is_one and not is_live[k]]
            for place in free:
                scheduler.finish(place, self.row(place, scheduler.rows[place]))
            taken = scheduler.admit(free)
            if not taken:
                return is_live
            self.restart(torch.tensor(taken, device=self.canvas.tokens.device), scheduler)
            is_live = self.canvas.is_live.tolist()

    def restart(self, places: Tensor, scheduler: Scheduler) -> None:
        """Begin anew in some places, `[n]` int64, with the rows that stand there now."""
        prompt = scheduler.prompt()
        self.noise.refill(scheduler.noise())
        fresh = self._blank(prompt)
        for name in PER_ROW:
            value = getattr(self.canvas, name).index_copy(0, places, getattr(fresh, name)[places])
            setattr(self.canvas, name, value)
        self._told = self._told.index_copy(0, places, fresh.lengths[places])
        self.ledger.restart(places)
        self._eyes.restart(places, prompt)
        for state in self._states:
            state.restart(places)
        self.is_new = True

    def row(self, place: int, row: int) -> FinishedRow:
        """What was committed in a place, where that row stands."""
        tokens = self.canvas.tokens[place, : int(self.canvas.limit[place])].clone()
        gains, passes, nats = self.ledger.row(place)
        return FinishedRow(row, tokens, passes, count_gains(gains), 0.0, nats)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Turns an interrupt into one that brings what was committed.

        Raises:
            CanvasInterrupt: in the place of KeyboardInterrupt.
        """
        try:
            yield
        except KeyboardInterrupt as stop:
            made = self.generation()
            raise CanvasInterrupt(made, self._committed(made.lengths)) from stop

    def generation(self) -> Generation:
        """The result, of all rows."""
        canvas, ledger = self.canvas, self.ledger
        tokens = torch.where(canvas.slots < canvas.limit[:, None], canvas.tokens, 0)
        lengths, passes = canvas.limit.clone(), ledger.report(self.stats, canvas.lengths)
        if self.scheduler is not None:
            tokens, lengths, passes = self._all(self.scheduler, tokens, lengths, passes)
        self.stats.forward_seconds = self._eyes.seconds
        self.stats.seconds = time.perf_counter() - self._began
        return Generation(tokens, lengths, passes, self.stats)

    def _all(
        self, scheduler: Scheduler, tokens: Tensor, limit: Tensor, passes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Those of all rows: ended ones, those in the places, and those that never came."""
        index = limit.new_tensor(
            [row for row, is_one in zip(scheduler.rows, scheduler.is_open) if is_one]
        )
        open_places = limit.new_tensor([k for k, is_one in enumerate(scheduler.is_open) if is_one])
        blank = self._blank(scheduler.whole)
        found = blank.tokens.index_copy(0, index, tokens[open_places])
        lengths = blank.limit.index_copy(0, index, limit[open_places])
        taken = torch.zeros_like(lengths).index_copy(0, index, passes[open_places])
        for row, ended in scheduler.ended.items():
            lengths[row], taken[row] = len(ended.tokens), ended.passes
            found[row] = 0
            found[row, : len(ended.tokens)] = ended.tokens
        done = sum(len(ended.tokens) for ended in scheduler.ended.values())
        self.stats.tokens = done + int(self.canvas.lengths[open_places].sum())
        return found, lengths, taken

    def _committed(self, lengths: Tensor) -> Tensor:
        """`[B, L]` bool of all rows."""
        scheduler, canvas = self.scheduler, self.canvas
        if scheduler is None:
            return canvas.is_committed
        found = self._blank(scheduler.whole).is_committed
        for place, row in enumerate(scheduler.rows):
            found[row] = canvas.is_committed[place]
        for row in scheduler.ended:
            found[row] = canvas.slots < lengths[row]
        return found


class CanvasRun(CanvasRows):
    """One run of B rows.

    Args:
        policy: for the statistics.
        model: the denoiser.
        prompt: R = G * B rows.
        length: L, slots to fill.
        filters, noise: as in `mmaccel.contracts.Policy.sample`.
        on_step: called after every pass.
        block: slots per block, None for one block; a block-causal model's own by default.
        cache: what passes reuse.
        copies: most canvases looked at in one pass.
        layout: of these, "rows" beside each other or as "entries" of one row.

    Attributes:
        canvas: what is committed.
        ledger: what it cost.
        noise, layout: of the run, for orders.
        draws: None, or a function that is given what a pass tells of and returns it with other
            tokens drawn; for proofs that go through all of them.

    Raises:
        OptionError, ShapeError, UnsupportedModelError: see `check_run` and `check_leaks`.
    """

    looks: ClassVar[type[CanvasLook]] = CanvasLook

    def __init__(
        self,
        policy: CanvasPolicy,
        model: Denoiser,
        prompt: Prompt,
        length: int,
        *,
        params: SamplingParams,
        noise: Noise,
        on_step: OnCanvasStep | None = None,
        block: int | None = None,
        cache: CachePlan,
        copies: int = 1,
        layout: str = "rows",
    ) -> None:
        self._began = time.perf_counter()
        check_run(model, prompt, length, params, noise, block, cache, layout)
        if cache.kind == "block":
            check_leaks(model, prompt.tokens.shape[0])
        self.scheduler = None
        if prompt.batching is not None:
            self.scheduler = Scheduler(prompt, prompt.batching, noise)
            prompt, noise = self.scheduler.prompt(), self.scheduler.noise()
        self.on_step, self.noise, self.layout = on_step, noise, prompt.layout
        self.draws: Callable[[SlotPredictions], SlotPredictions] | None = None
        self.stats = Stats(
            policy=repr(policy), exactness=policy.exactness, branches=prompt.branches
        )
        own, batch = model.block, prompt.batch
        block = own if block is None else block
        self._blank = partial(blank_canvas, length, model.mask_token, block, own is not None)
        self.canvas = self._blank(prompt)
        self._told = self.canvas.lengths
        self._is_bad = torch.zeros_like(self.canvas.held)
        self.ledger = DivergenceBound(batch, prompt.tokens.device)
        width = length if block is None else min(block, length)
        self._eyes = self.looks(
            model, prompt, self.canvas, width, params, noise, cache, copies, layout
        )

    def look(self) -> SlotPredictions:
        """One pass over the canvas as it stands; evidence `[B, Q]` of the active block."""
        self.is_new = False
        seen, n_entries = self._eyes.look(self.canvas, 1)
        self.ledger.compute(n_entries)
        return seen if self.draws is None else self.draws(seen)

    def commit(self, seen: SlotPredictions, chosen: Tensor) -> None:
        """Put the drawn tokens of chosen slots on the canvas and move on.

        Args:
            seen: of the canvas as it stands.
            chosen: `[B, Q]` bool. Where it holds none of a row's open slots, the surest is taken.
        """
        chosen = seen.at_least_one(chosen)
        assert seen.drawn is not None
        was_open = self.canvas.is_live
        self._is_bad = self._is_bad | (seen.has_invalid_logits & was_open)
        n_new = self.place(self.canvas, chosen, seen.drawn)
        self.ledger.charge(n_new, bound_nats(seen.entropy, chosen), was_open)
        self.move()

    def place(self, canvas: Canvas, chosen: Tensor, tokens: Tensor) -> Tensor:
        """Commit `tokens` where `chosen`, `[n * B, Q]` both, on copies of the canvas or on itself.

        Returns:
            `[n * B]` int64, slots committed.
        """
        slots = self._eyes.slots(canvas)
        n_new = canvas.commit(canvas.spread(slots, chosen, False), canvas.spread(slots, tokens, 0))
        canvas.stop()
        return n_new

    def move(self) -> None:
        """Look for stop tokens, move on from full blocks, and tell `on_step`."""
        self._settle()
        if self.on_step is None or bool(self._is_bad.any()):  # what was drawn without a law
            return
        canvas, ledger, lengths = self.canvas, self.ledger, self.canvas.lengths
        state = (canvas.tokens.clone(), canvas.is_committed.clone(), lengths, self._told)
        self._told = lengths
        rows = None if self.scheduler is None else tuple(self.scheduler.rows)
        limit = self.on_step(CanvasProgress(*state, ledger.passes, ledger.nats.clone(), rows))
        if limit is not None:
            canvas.cut(check_limit(limit, canvas.limit))
            self._settle()

    def _settle(self) -> None:
        moved = self.canvas.settle()
        self._eyes.note(moved & self.canvas.is_live)


def blank_canvas(
    length: int, mask_token: int | None, block: int | None, is_own: bool, prompt: Prompt
) -> Canvas:
    """A canvas before its first pass.

    Args:
        length, mask_token, block: see `Canvas`.
        is_own: whether the model has blocks, which are counted from a row's first token.
        prompt: of its rows.
    """
    offset = torch.zeros_like(prompt.lengths[: prompt.batch])
    if is_own and block is not None:
        offset = prompt.lengths[: prompt.batch] % block
    return Canvas(prompt, length, mask_token, block, offset)
