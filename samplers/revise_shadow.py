"""Leave-one-out revision: tokens are taken back that the others would not bring about.

F. Hong et al., "Wide-In, Narrow-Out" (WINO), ICLR 2026, arXiv 2507.18578, section 4.2, with the
bounds of its release on what a pass commits and takes back.

It ends: at a pass that commits a slots, fewer are taken back than the pass before committed, and
none at a block's first. So with a_t commits at pass t at least a_T + (T - 1) slots are committed
after T passes, and a block of n slots takes at most n passes, no more than one slot a pass does.

Departures: per row; a stop token is not taken back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.samplers.evidence import Evidence
from mmaccel.samplers.revise import RevisedRun, ShadowRun
from mmaccel.samplers.select import top


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
        """See `mmaccel.samplers.revise.Reviser`. There is nothing to forget: before a row's first
        pass nothing stands that it could take back.
        """

    def most(self, seen: Evidence) -> Tensor:
        """Seven tenths of the open slots, but 5 to 20; see `Reviser`."""
        return (0.7 * seen.is_open.sum(1)).long().clamp(5, 20)

    def revise(self, run: RevisedRun, seen: Evidence, new: Tensor) -> None:
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
