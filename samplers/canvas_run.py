"""A run over a canvas: look, let a policy choose, commit, until nothing is open.

S. Nie et al., "Large Language Diffusion Models", 2025, arXiv 2502.09992, algorithm 5 (masked
diffusion, remasking turned round: what is not committed was never unmasked), and M. Arriola et al.,
"Block Diffusion", 2025, arXiv 2503.09573, algorithm 2 (blocks), as one loop.

Departures: everything is per row, so that a row's result does not depend on its batch; at least one
slot of every open row is committed per pass; noise is frozen per slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from mmaccel.canvas_contracts import (
    CanvasPolicy,
    CanvasProgress,
    Denoiser,
    OnCanvasStep,
)
from mmaccel.contracts import Prompt
from mmaccel.results import Stats
from mmaccel.samplers.cache_plan import CachePlan
from mmaccel.samplers.canvas import Canvas
from mmaccel.samplers.canvas_checks import check_run
from mmaccel.samplers.canvas_leak import check_leaks
from mmaccel.samplers.canvas_look import CanvasLook
from mmaccel.samplers.canvas_rows import CanvasRows
from mmaccel.samplers.evidence import Evidence
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.ledger import Ledger, bound_nats
from mmaccel.samplers.line import check_limit
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.seat_plan import SeatPlan


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
        filters: Filters,
        noise: Noise,
        on_step: OnCanvasStep | None = None,
        block: int | None = None,
        cache: CachePlan,
        copies: int = 1,
        layout: str = "rows",
    ) -> None:
        self._began = time.perf_counter()
        check_run(model, prompt, length, filters, noise, block, cache, layout)
        if cache.kind == "block":
            check_leaks(model, prompt.tokens.shape[0])
        self.seats = None
        if prompt.places is not None:
            self.seats = SeatPlan(prompt, prompt.places, noise)
            prompt, noise = self.seats.prompt(), self.seats.noise()
        self.on_step, self.noise, self.layout = on_step, noise, prompt.layout
        self.draws: Callable[[Evidence], Evidence] | None = None
        self.stats = Stats(
            policy=repr(policy), exactness=policy.exactness, branches=prompt.branches
        )
        own, batch = model.block, prompt.batch
        block = own if block is None else block
        self._blank = partial(blank_canvas, length, model.mask_token, block, own is not None)
        self.canvas = self._blank(prompt)
        self._told = self.canvas.lengths
        self._is_bad = torch.zeros_like(self.canvas.held)
        self.ledger = Ledger(batch, prompt.tokens.device)
        width = length if block is None else min(block, length)
        self._eyes = self.looks(
            model, prompt, self.canvas, width, filters, noise, cache, copies, layout
        )

    def look(self) -> Evidence:
        """One pass over the canvas as it stands; evidence `[B, Q]` of the active block."""
        self.is_new = False
        seen, n_entries = self._eyes.look(self.canvas, 1)
        self.ledger.compute(n_entries)
        return seen if self.draws is None else self.draws(seen)

    def commit(self, seen: Evidence, chosen: Tensor) -> None:
        """Put the drawn tokens of chosen slots on the canvas and move on.

        Args:
            seen: of the canvas as it stands.
            chosen: `[B, Q]` bool. Where it holds none of a row's open slots, the surest is taken.
        """
        chosen = seen.at_least_one(chosen)
        assert seen.drawn is not None
        was_open = self.canvas.is_live
        self._is_bad = self._is_bad | (seen.is_lawless & was_open)
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
        rows = None if self.seats is None else tuple(self.seats.rows)
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
