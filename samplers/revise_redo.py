"""Redoing: once a block is full, what was unsure when it was committed is decoded again, slowly.

Reveal-time confidence is what a token had before it was there. What a model thinks of a token it
sees is no evidence: a wrong one is kept, confidently, because it is there.

It ends: every block is redone once, one slot a pass, so that n slots take at most 2 n passes.

Source: a practice of users rather than of a paper; the confidence is that of MaskGIT (H. Chang et
al., CVPR 2022, arXiv 2202.04200), kept beyond the pass.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from mmaccel.samplers.evidence import Evidence
from mmaccel.samplers.revise import RevisedRun


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
        """See `mmaccel.samplers.revise.Reviser`: no block is the one before."""
        self._start = self._start.index_fill(0, places, -1)

    def most(self, seen: Evidence) -> Tensor:
        """One in a block that is redone; see `Reviser`."""
        redoes = self._redoes & (self._run.canvas.start == self._start)
        return torch.where(redoes, 1, seen.is_open.sum(1))

    def revise(self, run: RevisedRun, seen: Evidence, new: Tensor) -> None:
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
