"""The same place in the previous frame, in a clip."""

from __future__ import annotations

from dataclasses import dataclass

from mmaccel.samplers.drafting.contract import Drafts, DraftSource, Frontier
from mmaccel.samplers.drafting.copying import copy_back


@dataclass(frozen=True)
class PreviousFrame(DraftSource):
    """Tokens of the previous frame; in the first one copies of the last known token."""

    is_capturable = True
    reads_last_scores = False
    needs_layout = "frames"
    name = "previous-frame"

    def propose(self, frontier: Frontier) -> Drafts:
        assert frontier.layout is not None
        return Drafts(copy_back(frontier, frontier.layout.frame))
