"""Revision: committed tokens are taken back or replaced, between a commit and the next pass.

A reviser ends because it is bounded: what it takes back is less than what was committed before it,
or it acts so many times a block and no more. Each one's file says why.

Token editing: a committed token is replaced where the model, that sees it, prefers another.

T. Bie et al., "LLaDA2.1: Speeding Up Text Diffusion via Token Editing", 2026, arXiv 2602.08676,
section 2 (mask-to-token and token-to-token updates in one pass). It needs a model trained to edit.

It ends: every pass over a block with an open slot commits one, and over a full block there are at
most `budget` passes more.

Departures: per row; a stop token stays, and a row stops looking once nothing is to be replaced.

Redoing: once a block is full, what was unsure when it was committed is decoded again, slowly.

Reveal-time confidence is what a token had before it was there. What a model thinks of a token it
sees is no evidence: a wrong one is kept, confidently, because it is there.

It ends: every block is redone once, one slot a pass, so that n slots take at most 2 n passes.

Source: a practice of users rather than of a paper; the confidence is that of MaskGIT (H. Chang et
al., CVPR 2022, arXiv 2202.04200), kept beyond the pass.

Leave-one-out revision: tokens are taken back that the others would not bring about.

F. Hong et al., "Wide-In, Narrow-Out" (WINO), ICLR 2026, arXiv 2507.18578, section 4.2, with the
bounds of its release on what a pass commits and takes back.

It ends: at a pass that commits a slots, fewer are taken back than the pass before committed, and
none at a block's first. So with a_t commits at pass t at least a_T + (T - 1) slots are committed
after T passes, and a block of n slots takes at most n passes, no more than one slot a pass does.

Departures: per row; a stop token is not taken back.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from mmaccel.samplers.canvas.model_pass import CanvasLook, ShadowLook
from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.canvas.run import CanvasRun
from mmaccel.samplers.canvas.selector import top


class Reviser(Protocol):
    """Revises one run; what it carries is kept per row."""

    def restart(self, places: Tensor) -> None:
        """Forget the rows of some places, `[n]` int64; others begin there."""

    def most(self, seen: SlotPredictions) -> Tensor:
        """`[B]` int64, slots that may be committed at this pass."""

    def revise(self, run: RevisedRun, seen: SlotPredictions, new: Tensor) -> None:
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

    def commit(self, seen: SlotPredictions, chosen: Tensor) -> None:
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


class EditReviser:
    """Replaces tokens where another has a probability above `least`.

    Args:
        run: of B rows.
        least: probability.
        budget: passes over a block once it is full.
    """

    def __init__(self, run: RevisedRun, least: float, budget: int) -> None:
        self._least, self._budget = least, budget
        self._start = torch.full_like(run.canvas.start, -1)
        self._extra = torch.zeros_like(run.canvas.start)  # passes over the block, once full

    def restart(self, places: Tensor) -> None:
        """See `mmaccel.samplers.canvas.revision.Reviser`: no block is the one before."""
        self._start = self._start.index_fill(0, places, -1)

    def most(self, seen: SlotPredictions) -> Tensor:
        """As many as there are; see `Reviser`."""
        return seen.is_open.sum(1)

    def revise(self, run: RevisedRun, seen: SlotPredictions, new: Tensor) -> None:
        """See `Reviser`."""
        canvas, slots = run.canvas, run.slots
        self._extra = torch.where(canvas.start == self._start, self._extra, 0)
        self._start = canvas.start
        chance, best = seen.law.softmax(-1).max(-1)  # [B, Q]
        other = best != canvas.tokens.gather(1, seen.slots)
        standing = run.standing() & ~new
        run.mistrust((standing & chance.isnan()).any(1))
        edited = standing & other & (chance > self._least)
        canvas.replace(canvas.spread(slots, edited, False), canvas.spread(slots, best, 0))
        goes_on = ~canvas.held | edited.any(1)
        canvas.held = run.is_full() & goes_on & (self._extra < self._budget)
        self._extra = self._extra + canvas.held


class RedoReviser:
    """Opens slots again that were committed with less than `least`, and their neighbours.

    Args:
        run: of B rows.
        least: probability of the likeliest token.
    """

    def __init__(self, run: RevisedRun, least: float) -> None:
        self._least = least
        self._start = torch.full_like(run.canvas.start, -1)
        self._redoes = torch.zeros_like(run.canvas.held)
        self._sure = torch.ones(run.canvas.tokens.shape, device=self._start.device)
        self._run = run

    def restart(self, places: Tensor) -> None:
        """See `mmaccel.samplers.canvas.revision.Reviser`: no block is the one before."""
        self._start = self._start.index_fill(0, places, -1)

    def most(self, seen: SlotPredictions) -> Tensor:
        """One in a block that is redone; see `Reviser`."""
        redoes = self._redoes & (self._run.canvas.start == self._start)
        return torch.where(redoes, 1, seen.is_open.sum(1))

    def revise(self, run: RevisedRun, seen: SlotPredictions, new: Tensor) -> None:
        """See `Reviser`."""
        canvas, slots = run.canvas, run.slots
        self._redoes = self._redoes & (canvas.start == self._start)
        self._start = canvas.start
        wide = canvas.spread(slots, new, False)
        peak = seen.peak.where(new, 1.0)
        self._sure = torch.where(wide, canvas.spread(slots, peak, True), self._sure)
        standing = run.standing()
        doubtful = standing & (self._sure.gather(1, seen.slots) < self._least)
        near = max_pool1d(doubtful[:, None].float(), 3, 1, 1)[:, 0] > 0
        due = run.is_full() & ~self._redoes
        canvas.reopen(canvas.spread(slots, near & standing & due[:, None], False))
        self._redoes = self._redoes | due


class ShadowReviser:
    """Takes back tokens whose probability without them is below `least`.

    Args:
        run: of B rows.
        least: probability.
    """

    def __init__(self, run: RevisedRun, least: float) -> None:
        self._least = least
        self._start = torch.full_like(run.canvas.start, -1)
        self._last = torch.ones_like(run.canvas.start)  # slots of the last pass

    def restart(self, places: Tensor) -> None:
        """See `mmaccel.samplers.canvas.revision.Reviser`. There is nothing to forget: before a row's first
        pass nothing stands that it could take back.
        """

    def most(self, seen: SlotPredictions) -> Tensor:
        """Seven tenths of the open slots, but 5 to 20; see `Reviser`."""
        return (0.7 * seen.is_open.sum(1)).long().clamp(5, 20)

    def revise(self, run: RevisedRun, seen: SlotPredictions, new: Tensor) -> None:
        """See `Reviser`."""
        assert isinstance(run, ShadowRun)
        canvas, n_new = run.canvas, new.sum(1)
        room = torch.where(canvas.start == self._start, self._last - 1, 0)
        room = torch.where(n_new > 1, room, 0)
        standing = run.standing() & ~new
        run.mistrust((standing & run.left_out.isnan()).any(1))
        doubtful = standing & (run.left_out < self._least)
        back = top(-run.left_out, doubtful, room)
        canvas.reopen(canvas.spread(run.slots, back, False))
        self._start, self._last = canvas.start, n_new
