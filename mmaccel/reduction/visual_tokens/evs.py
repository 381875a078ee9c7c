"""EVS: N. Bagrov et al. (arXiv:2510.14624), and its form in vLLM (pull request 22980): a token's
score is one minus its cosine with the token at the same place of the frame before; the highest
scores of the video stay.

Departures: a token without one before it at its place stays like those of the first frame. At a
budget below the size of the first frame that frame stays whole, as in vLLM, and the count is its
size. `least_change` lets a still video keep fewer tokens than its budget.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmaccel.checks import within
from mmaccel.reduction.visual_tokens import budgets
from mmaccel.reduction.visual_tokens.context import VisualContext
from mmaccel.reduction.visual_tokens.contract import TokenReducer
from mmaccel.reduction.visual_tokens.selection import itself, unit

_NEW = 3.0  # above the distance of opposite vectors


@dataclass(frozen=True)
class EVS(TokenReducer):
    """Keeps what changed in a video; the first frame stays whole.

    Args:
        least_change: a token that changed by less (0 nothing, 1 orthogonal) goes even if there is
            budget; None: keep the whole budget.

    Loses: under a moving camera, and for slow movement; a server with many requests was slower by
    it (vLLM issue 51221).
    """

    least_change: float | None = within(None, 0, 2, "0.1 is a visible change")

    needs = frozenset({"frames", "grid"})

    def budget(self, context: VisualContext) -> Tensor:
        """Never less than the first frame, `[B]`."""
        first = (context.valid & (context.group == 0)).sum(1)
        return super().budget(context).maximum(first)

    def score(self, context: VisualContext) -> Tensor:
        """Change since the frame before, `[B, N]`."""
        valid = context.valid
        vectors = unit(context.x, context.valid)
        before = _same_place_before(context)
        index = before.clamp(min=0)[..., None].expand_as(vectors)
        change = 1 - (vectors * vectors.gather(1, index)).sum(2)
        return change.masked_fill((before < 0) & valid, _NEW)

    def limit(self, scores: Tensor, context: VisualContext, budget: Tensor) -> Tensor:
        if self.least_change is None:
            return budget
        return budget.minimum(budgets.threshold(scores, context.valid, self.least_change))


def _same_place_before(context: VisualContext) -> Tensor:
    """The token at a token's place in the frame before: `[B, N]` int64, -1 for none."""
    known = context.valid & (context.row >= 0) & (context.column >= 0)
    frame, row, column = (
        axis.where(known, 0) for axis in (context.group, context.row, context.column)
    )
    frames, rows, columns = (int(axis.max()) + 1 for axis in (frame, row, column))
    place = (frame * rows + row) * columns + column
    table = place.new_full((len(place), frames * rows * columns + 1), -1)  # the last for unknown
    table.scatter_(1, place.where(known, table.shape[1] - 1), itself(place).where(known, -1))
    earlier = place - rows * columns
    return table.gather(1, earlier.clamp(min=0)).where(known & (earlier >= 0), -1)
