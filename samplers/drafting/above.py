"""The token above, in a grid of rows."""

from __future__ import annotations

from dataclasses import dataclass

from mmaccel.samplers.drafting.contract import Drafts, DraftSource, Frontier
from mmaccel.samplers.drafting.copying import copy_back


@dataclass(frozen=True)
class Above(DraftSource):
    """Tokens of the row above; in the first row copies of the last known token."""

    is_capturable = True
    reads_last_scores = False
    needs_layout = "rows"
    name = "above"

    def propose(self, frontier: Frontier) -> Drafts:
        assert frontier.layout is not None
        return Drafts(copy_back(frontier, frontier.layout.columns))
