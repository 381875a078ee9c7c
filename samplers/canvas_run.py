"""A run over a canvas: look, let a policy choose, commit, until nothing is open.

S. Nie et al., "Large Language Diffusion Models", 2025, arXiv 2502.09992, algorithm 5 (masked
diffusion, remasking turned round: what is not committed was never unmasked), and M. Arriola et al.,
"Block Diffusion", 2025, arXiv 2503.09573, algorithm 2 (blocks), as one loop.

Departures: everything is per row, so that a row's result does not depend on its batch; at least one
slot of every open row is committed per pass; noise is frozen per slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor

from mmaccel.canvas_contracts import (
    CanvasInterrupt,
    CanvasPolicy,
    CanvasProgress,
    Denoiser,
    OnCanvasStep,
)
from mmaccel.contracts import Prompt
from mmaccel.errors import NumericsError
from mmaccel.results import Generation, Stats
from mmaccel.samplers.cache_plan import CachePlan
from mmaccel.samplers.canvas import Canvas
from mmaccel.samplers.canvas_checks import check_run
from mmaccel.samplers.canvas_look import CanvasLook
from mmaccel.samplers.evidence import Evidence
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.ledger import Ledger, bound_nats
from mmaccel.samplers.line import check_limit
from mmaccel.samplers.noise import Noise


class CanvasRun:
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
        OptionError, ShapeError: see `check_run`.
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
        self.on_step, self.noise, self.layout = on_step, noise, prompt.layout
        self.draws: Callable[[Evidence], Evidence] | None = None
        self.stats = Stats(
            policy=repr(policy), exactness=policy.exactness, branches=prompt.branches
        )
        own, batch = model.block, prompt.batch
        block = own if block is None else block
        offset = torch.zeros_like(prompt.lengths[:batch])
        if own is not None and block is not None:  # its blocks are counted from a row's first token
            offset = prompt.lengths[:batch] % block
        self.canvas = Canvas(prompt, length, model.mask_token, block, offset)
        self._told = self.canvas.lengths
        self._is_bad = torch.zeros((), dtype=torch.bool, device=offset.device)
        self.ledger = Ledger(batch, prompt.tokens.device)
        width = length if block is None else min(block, length)
        self._eyes = self.looks(
            model, prompt, self.canvas, width, filters, noise, cache, copies, layout
        )

    @property
    def is_open(self) -> bool:
        """Whether any slot is still to be committed. Cost: one host synchronisation.

        Raises:
            NumericsError: a slot that was to be chosen or left had no law.
        """
        is_open, is_bad = torch.stack([self.canvas.is_live.any(), self._is_bad]).tolist()
        if is_bad:
            raise NumericsError(
                "scores: expected finite logits with at least one possible token, received NaN, "
                "infinity or none; check the model's dtype and weights, or loosen the layout"
            )
        return bool(is_open)

    def look(self) -> Evidence:
        """One pass over the canvas as it stands; evidence `[B, Q]` of the active block."""
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
        self._is_bad |= (seen.is_lawless & was_open).any()
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
        if self.on_step is None:
            return
        canvas, ledger, lengths = self.canvas, self.ledger, self.canvas.lengths
        state = (canvas.tokens.clone(), canvas.is_committed.clone(), lengths, self._told)
        self._told = lengths
        limit = self.on_step(CanvasProgress(*state, ledger.passes, ledger.nats.clone()))
        if limit is not None:
            canvas.cut(check_limit(limit, canvas.limit))
            self._settle()

    def _settle(self) -> None:
        moved = self.canvas.settle()
        self._eyes.note(moved & self.canvas.is_live)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Turns an interrupt into one that brings what was committed.

        Raises:
            CanvasInterrupt: in the place of KeyboardInterrupt.
        """
        try:
            yield
        except KeyboardInterrupt as stop:
            raise CanvasInterrupt(self.generation(), self.canvas.is_committed) from stop

    def generation(self) -> Generation:
        """The result."""
        canvas = self.canvas
        tokens = torch.where(canvas.slots < canvas.limit[:, None], canvas.tokens, 0)
        passes = self.ledger.report(self.stats, canvas.lengths)
        self.stats.forward_seconds = self._eyes.seconds
        self.stats.seconds = time.perf_counter() - self._began
        return Generation(tokens, canvas.limit.clone(), passes, self.stats)
