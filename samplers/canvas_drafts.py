"""A canvas run that looks at several canvases in one pass and goes on from one of them."""

from __future__ import annotations

from torch import Tensor

from mmaccel.samplers.canvas import Canvas
from mmaccel.samplers.canvas_run import CanvasRun
from mmaccel.samplers.evidence import Evidence


class DraftRun(CanvasRun):
    """`CanvasRun` with drafts; the same arguments."""

    @property
    def is_due(self) -> bool:
        """Whether the next pass writes what later ones read, or is some row's first: it takes one
        canvas only.
        """
        return self.is_new or self._eyes.is_due(self.canvas)

    def look_along(self, drafts: Canvas, copies: int) -> list[Evidence]:
        """One pass over several canvases at once.

        Args:
            drafts: `[K * B]` rows, copies of the canvas with more committed in the active block.
            copies: K.

        Returns:
            Evidence `[B, Q]` of each.
        """
        seen, n_entries = self._eyes.look(drafts, copies)
        self.ledger.compute(n_entries)
        return seen.split(copies)

    def accept(self, drafts: Canvas, index: Tensor) -> None:
        """Go on from one of the copies `[K * B]` that were looked at, `index` `[B]` in 0..K-1.

        What that committed is counted with the next `commit`.
        """
        before = self.canvas.is_committed.sum(1)
        self.canvas.take(drafts, index)
        self.ledger.gain(self.canvas.is_committed.sum(1) - before)

    def still_open(self, seen: Evidence) -> Tensor:
        """`[B, Q]` bool, slots of `seen` that are open yet and in the active block yet."""
        return seen.is_open & self.canvas.active().gather(1, seen.slots)

    def room_ahead(self, most: int) -> Tensor:
        """`[B]` int64, up to `most`: slots that can be committed before a full pass is due."""
        return self._eyes.room_ahead(self.canvas, most)
