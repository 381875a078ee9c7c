"""Revision: committed tokens are taken back or replaced, between a commit and the next pass.

A reviser ends because it is bounded: what it takes back is less than what was committed before it,
or it acts so many times a block and no more. Each one's file says why.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor

from mmaccel.samplers.canvas_look import CanvasLook
from mmaccel.samplers.canvas_run import CanvasRun
from mmaccel.samplers.canvas_shadow import ShadowLook
from mmaccel.samplers.evidence import Evidence


class Reviser(Protocol):
    """Revises one run; what it carries is kept per row."""

    def restart(self, places: Tensor) -> None:
        """Forget the rows of some places, `[n]` int64; others begin there."""

    def most(self, seen: Evidence) -> Tensor:
        """`[B]` int64, slots that may be committed at this pass."""

    def revise(self, run: RevisedRun, seen: Evidence, new: Tensor) -> None:
        """Change what is committed in the active blocks.

        Args:
            run: its canvas holds the pass's commits and has not moved on.
            seen: evidence of the pass.
            new: `[B, Q]` bool, what it committed.
        """


class RevisedRun(CanvasRun):
    """`CanvasRun` with a reviser; the same arguments. `revise_by` is owed before the first pass."""

    def revise_by(self, reviser: Reviser) -> None:
        """Let a reviser have the canvas behind every commit."""
        self.reviser = reviser
        self.keep(reviser)

    @property
    def slots(self) -> Tensor:
        """`[B, Q]` int64, slots from the active block's first on; L and more are none."""
        return self._eyes.slots(self.canvas)

    def commit(self, seen: Evidence, chosen: Tensor) -> None:
        """See `CanvasRun.commit`."""
        self._seen, self._before = seen, self.canvas.is_committed
        super().commit(seen, chosen)

    def move(self) -> None:
        """Revise, then see `CanvasRun.move`."""
        new = (self.canvas.is_committed & ~self._before).gather(1, self._seen.slots)
        self.reviser.revise(self, self._seen, new & (self.slots < self.canvas.end[:, None]))
        super().move()

    def mistrust(self, rows: Tensor) -> None:
        """Of these rows, `[B]` bool, something was to be revised by scores that are no law."""
        self._is_bad = self._is_bad | rows

    def standing(self) -> Tensor:
        """`[B, Q]` bool, committed slots of the active block that may be revised: not given, and
        no stop token, which has ended the row for good.
        """
        canvas = self.canvas
        may = canvas.is_committed & ~canvas.is_given
        if canvas.stop_tokens is not None:
            may = may & ~(canvas.tokens[..., None] == canvas.stop_tokens).any(-1)
        slots = self.slots
        end = torch.minimum(canvas.end, canvas.limit)[:, None]
        return may.gather(1, slots.clamp(max=canvas.length - 1)) & (slots < end)

    def is_full(self) -> Tensor:
        """`[B]` bool, rows whose active block has no open slot left."""
        canvas = self.canvas
        return ~canvas.active().any(1) & (canvas.start < canvas.limit)


class ShadowRun(RevisedRun):
    """`RevisedRun` whose passes look at shadows too; layout "entries"."""

    looks: ClassVar[type[CanvasLook]] = ShadowLook

    @property
    def left_out(self) -> Tensor:
        """`[B, Q]` float32, see `ShadowLook`."""
        assert isinstance(self._eyes, ShadowLook)
        return self._eyes.left_out
