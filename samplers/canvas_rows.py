"""Rows of a canvas run: which stand in its places, who comes next, and what became of them all.

The canvas's side of `mmaccel.places.Places`: between two passes, rows without an open slot are
handed out and the next ones of the prompt begin in their places with everything anew. What is kept
per row beside the canvas (memories, revisers, orders) is told so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasInterrupt
from mmaccel.contracts import Layout, Prompt
from mmaccel.places import EndedRow
from mmaccel.results import Generation, Stats
from mmaccel.samplers.canvas import PER_ROW, Canvas
from mmaccel.samplers.canvas_live import live_rows
from mmaccel.samplers.canvas_look import CanvasLook
from mmaccel.samplers.ledger import Ledger
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.orders import Order, make_order
from mmaccel.samplers.seat_plan import SeatPlan
from mmaccel.samplers.tally import count_gains
from mmaccel.samplers.window_checks import no_law


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
    ledger: Ledger
    noise: Noise
    layout: Layout | None
    seats: SeatPlan | None
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
            rows = places if self.seats is None else [self.seats.rows[k] for k in places]
            raise no_law(tuple(rows), "layout")
        if self.seats is not None:
            is_live = self._turn_over(self.seats, is_live)
        eyes, device = self._eyes, self.canvas.tokens.device
        eyes.live = None if eyes.by_entry else live_rows(eyes.model, is_live, device)
        return any(is_live)

    def _turn_over(self, seats: SeatPlan, is_live: list[bool]) -> list[bool]:
        """Hand out rows that have ended, and let others take their places; returns which places
        hold a row that has not.
        """
        while True:  # a newcomer may have nothing open: its layout gives it all
            free = [k for k, is_one in enumerate(seats.is_open) if is_one and not is_live[k]]
            for place in free:
                seats.hand_out(place, self.row(place, seats.rows[place]))
            taken = seats.fill(free)
            if not taken:
                return is_live
            self.restart(torch.tensor(taken, device=self.canvas.tokens.device), seats)
            is_live = self.canvas.is_live.tolist()

    def restart(self, places: Tensor, seats: SeatPlan) -> None:
        """Begin anew in some places, `[n]` int64, with the rows that stand there now."""
        prompt = seats.prompt()
        self.noise.refill(seats.noise())
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

    def row(self, place: int, row: int) -> EndedRow:
        """What was committed in a place, where that row stands."""
        tokens = self.canvas.tokens[place, : int(self.canvas.limit[place])].clone()
        gains, passes, nats = self.ledger.row(place)
        return EndedRow(row, tokens, passes, count_gains(gains), 0.0, nats)

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
        if self.seats is not None:
            tokens, lengths, passes = self._all(self.seats, tokens, lengths, passes)
        self.stats.forward_seconds = self._eyes.seconds
        self.stats.seconds = time.perf_counter() - self._began
        return Generation(tokens, lengths, passes, self.stats)

    def _all(
        self, seats: SeatPlan, tokens: Tensor, limit: Tensor, passes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Those of all rows: ended ones, those in the places, and those that never came."""
        index = limit.new_tensor([row for row, is_one in zip(seats.rows, seats.is_open) if is_one])
        open_places = limit.new_tensor([k for k, is_one in enumerate(seats.is_open) if is_one])
        blank = self._blank(seats.whole)
        found = blank.tokens.index_copy(0, index, tokens[open_places])
        lengths = blank.limit.index_copy(0, index, limit[open_places])
        taken = torch.zeros_like(lengths).index_copy(0, index, passes[open_places])
        for row, ended in seats.ended.items():
            lengths[row], taken[row] = len(ended.tokens), ended.passes
            found[row] = 0
            found[row, : len(ended.tokens)] = ended.tokens
        done = sum(len(ended.tokens) for ended in seats.ended.values())
        self.stats.tokens = done + int(self.canvas.lengths[open_places].sum())
        return found, lengths, taken

    def _committed(self, lengths: Tensor) -> Tensor:
        """`[B, L]` bool of all rows."""
        seats, canvas = self.seats, self.canvas
        if seats is None:
            return canvas.is_committed
        found = self._blank(seats.whole).is_committed
        for place, row in enumerate(seats.rows):
            found[row] = canvas.is_committed[place]
        for row in seats.ended:
            found[row] = canvas.slots < lengths[row]
        return found
