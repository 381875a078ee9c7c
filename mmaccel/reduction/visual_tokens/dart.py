"""DART: Z. Wen et al., EMNLP 2025 (arXiv:2502.11494), section 4.2: pivots are the visual and the
text tokens with the largest keys by the L1 norm in an early layer. The visual ones stay, and of
each pivot the visual tokens least similar to it by the cosine of hidden states.

Departures: the pivots' lists are cut at a common depth such that their union fills the budget; the
code goes through pivots in the order of a Python set, drops the remainder of the budget, and
returns tokens unsorted, which scrambles their positions. Text pivots are ranked by hidden states
where the model gives no text keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mmaccel.checks import within
from mmaccel.reduction.visual_tokens.context import VisualContext
from mmaccel.reduction.visual_tokens.contract import Stage, TokenReducer
from mmaccel.reduction.visual_tokens.selection import invert, rank, top, union, unit


@dataclass(frozen=True)
class DART(TokenReducer):
    """Drops duplicates of a few pivots. No attention is read.

    Args:
        layer: the first that receives fewer tokens.
        image_pivots: visual tokens that others are compared with.
        text_pivots: text tokens that visual ones are compared with.

    Loses: where tokens far from a pivot are near each other; two layers compute all tokens.
    Figures: `scenes-vqa`: 1.3 points lost of 97.0 at 22 %, 7.7 at 11 %.
    """

    layer: int = within(2, 1, hint="a plan is made from the layer before")
    image_pivots: int = within(4, 1, hint="4 is the paper's")
    text_pivots: int = within(4, hint="4 is the paper's, 0 for none")

    stage: ClassVar[Stage] = "llm_layer"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"keys", "text"}) if self.text_pivots else frozenset({"keys"})

    def layers_in(self, depth: int) -> tuple[int, ...]:
        return (self.layer,)

    def score(self, context: VisualContext) -> Tensor:
        """How far down the pivots' lists a token is, `[B, N]`; visual pivots come first."""
        valid = context.valid
        norms = context.keys(self.layer - 1).flatten(2).float().abs().sum(2)
        pivots, used = _pick(context.x, norms, valid, self.image_pivots)
        if self.text_pivots:
            text = context.text()
            keys = text.states if text.keys is None else text.keys.flatten(2)
            text_pivots = _pick(text.states, keys.float().abs().sum(2), text.mask, self.text_pivots)
            pivots = torch.cat([pivots, text_pivots[0]], 1)
            used = torch.cat([used, text_pivots[1]], 1)
        cosine = unit(context.x, valid) @ normalize(pivots, dim=2).mT  # [B, N, P]
        ranks = torch.stack([rank(-column, valid) for column in cosine.unbind(2)], 2)
        last = torch.full_like(ranks, valid.shape[1])
        scores = union(ranks.where(used[:, None], last))
        return scores.masked_fill(top(norms, valid, context.counts.clamp(max=self.image_pivots)), 1)


def _pick(states: Tensor, norms: Tensor, mask: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n states of largest norm: `[B, n, C]` float32, and which of them exist, `[B, n]`."""
    order = invert(rank(norms, mask))[:, :n]
    picked = states.float().gather(1, order[..., None].expand(-1, -1, states.shape[2]))
    return picked, mask.gather(1, order)
