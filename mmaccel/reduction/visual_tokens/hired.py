"""HiRED: K. H. I. Arif et al., AAAI 2025 (arXiv:2408.10945), sections 4.1 and 4.2: the overview has
the fraction alpha of the budget. What the class token attends to most in it, in an early layer, is
located on the tiles, and a tile's share is in proportion to how many of these fall on it. Inside
the overview and each tile the highest by a late layer's attention stay.

Departures: shares add up to the budget (the code truncates each and spends less); what a tile
cannot hold goes to the others; the late ranking may be any other method's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from mmaccel.checks import MANY, one_of, show, within
from mmaccel.errors import OptionError
from mmaccel.reduction.visual_tokens.budgets import share_out
from mmaccel.reduction.visual_tokens.context import VisualContext
from mmaccel.reduction.visual_tokens.contract import TokenReducer
from mmaccel.reduction.visual_tokens.plan import Plan, keep_tokens
from mmaccel.reduction.visual_tokens.selection import (
    count_groups,
    top,
    top_in_groups,
)


@dataclass(frozen=True)
class HiRED(TokenReducer):
    """Gives each tile a budget of its own by the overview; the paper's is `keep=0.2`.

    Args:
        alpha: the overview's fraction of the budget.
        early: the encoder's layer whose attention gives the tiles their budgets.
        late: the encoder's layer whose attention ranks the tokens of a tile.
        queries: whose attention: "cls" the class token's, "all" that of all visual tokens.
        scorer: ranks the tokens of a tile instead of the late layer: a method whose scores decide
            alone, such as EVS or RandomTokens; its own budget is not used.

    Loses: small print in a tile that looks empty in the overview. For LLaVA-NeXT, and
    LLaVA-OneVision with `queries="all"`.
    Figures: `scenes-vqa`, 22 % kept: 6.7 points lost of 97.0.
    """

    alpha: float = within(0.5, 0, 1, "0.5 is the paper's")
    early: int = within(0, -MANY, hint="0 is the paper's")
    late: int = within(-2, -MANY, hint="-2 is the paper's")
    queries: Literal["cls", "all"] = one_of("cls", ("cls", "all"))
    scorer: TokenReducer | None = within(
        None, hint="give a method that ranks tokens, such as EVS or RandomTokens"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        scorer = self.scorer
        if scorer is not None and type(scorer).select is not TokenReducer.select:
            raise OptionError(
                f"HiRED.scorer: expected a method that ranks tokens, received {show(self.scorer)}; "
                "RandomTokens and EVS are such methods"
            )

    @property
    def needs(self) -> frozenset[str]:
        others = self.scorer.needs if self.scorer is not None else frozenset()
        return frozenset({f"{self.queries}_attention", "grid", "tiles"}) | others

    def score(self, context: VisualContext) -> Tensor:
        """Attention of the late layer, or the scorer's, `[B, N]`."""
        if self.scorer is not None:
            return self.scorer.score(context)
        return context.attention(self.late, self.queries)

    def select(self, scores: Tensor, context: VisualContext, budget: Tensor) -> Plan:
        shares = self.shares(context, budget)
        chosen = top_in_groups(scores, context.known_group, context.valid, shares)
        return keep_tokens(chosen, context.valid, context.size)

    def shares(self, context: VisualContext, budget: Tensor) -> Tensor:
        """How many tokens of each group stay, `[B, G]` int64: group 0 is the overview."""
        valid = context.valid
        group, sizes = context.known_group, context.group_sizes
        overview = valid & (group == 0)
        groups = sizes.shape[1]
        # the paper looks at the (1 - alpha) N most attended tokens of an overview of N
        looked_at = (overview.sum(1) * (1 - self.alpha) + 0.5).floor().long()
        early = context.attention(self.early, self.queries)
        tile = _tile_of(context, overview).clamp(max=groups - 1)
        hits = count_groups(tile, top(early, overview, looked_at), groups).double()
        weights = hits / hits.sum(1, keepdim=True).clamp(min=1) * (1 - self.alpha)
        weights[:, 0] = self.alpha
        return share_out(budget, weights, sizes)


def _tile_of(context: VisualContext, overview: Tensor) -> Tensor:
    """The tile, as a group, that shows what a token of the overview shows, `[B, N]` int64: 0 for
    tokens of tiles; in rows without tiles no group has it.
    """
    places = []
    for axis, tiles in zip((context.row, context.column), context.tile_grid.unbind(1), strict=True):
        extent = (axis + 1).where(overview, 1).amax(1).clamp(min=1)  # of the overview's grid
        places.append((axis.clamp(0) * tiles[:, None]).div(extent[:, None], rounding_mode="floor"))
    tile = 1 + places[0] * context.tile_grid[:, 1:] + places[1]
    return tile.where(overview, 0)
