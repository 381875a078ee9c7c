"""Token editing: a committed token is replaced where the model, that sees it, prefers another.

T. Bie et al., "LLaDA2.1: Speeding Up Text Diffusion via Token Editing", 2026, arXiv 2602.08676,
section 2 (mask-to-token and token-to-token updates in one pass). It needs a model trained to edit.

It ends: every pass over a block with an open slot commits one, and over a full block there are at
most `budget` passes more.

Departures: per row; a stop token stays, and a row stops looking once nothing is to be replaced.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.samplers.evidence import Evidence
from mmaccel.samplers.revise import RevisedRun


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
        """See `mmaccel.samplers.revise.Reviser`: no block is the one before."""
        self._start = self._start.index_fill(0, places, -1)

    def most(self, seen: Evidence) -> Tensor:
        """As many as there are; see `Reviser`."""
        return seen.is_open.sum(1)

    def revise(self, run: RevisedRun, seen: Evidence, new: Tensor) -> None:
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
