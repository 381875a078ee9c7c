"""TopP: C. Lin et al., "Twilight", 2025 (arXiv:2502.02770), sections 3 and 4. The weights of a
query are estimated, and of the candidates that a base method leaves the fewest are kept whose
weights sum up to p.

Departures: the paper estimates the weights of tokens with 4-bit keys; here a block's weight is that
of its entries at their mean score, or at the bound of `Quest`. Candidates are the `budget` blocks
with the largest weights. Blocks that are read in any case count first. Every query of a window has
its own share; all of them read the union.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mmaccel.checks import one_of, within
from mmaccel.kernels.block_scores import Kind, summarise
from mmaccel.kernels.choose_blocks import choose_mass
from mmaccel.reduction.sparse_attention.contract import (
    AttentionMethod,
    LayerBlocks,
    count_highest,
)
from mmaccel.reduction.sparse_attention.quest import score_bounds


@dataclass(frozen=True)
class TopP(AttentionMethod):
    """Reads the fewest blocks that have a share p of each query's estimated attention.

    Args:
        budget: the fraction of a row's blocks that are candidates, in (0, 1].
        p: the share, in (0, 1]; 1 keeps all candidates.
        estimate: of a block's scores, "means" or "bounds".

    Loses: where attention is spread evenly, and in wide windows, which read a union; the share is
    of an estimate.
    Figures: SmolLM2-135M: 93 % right with half of the blocks.
    """

    budget: float = 1.0
    p: float = within(
        0.95,
        0,
        1,
        "give the share of the estimated attention; 1 keeps all",
        above_low=True,
    )
    estimate: Literal["means", "bounds"] = one_of("means", ("means", "bounds"))

    @property
    def is_whole(self) -> bool:
        return self.budget >= 1 and self.p >= 1

    @property
    def summary(self) -> Kind | None:  # type: ignore[override]
        """Where all blocks are candidates."""
        return self.estimate if self.budget >= 1 else None

    @property
    def share(self) -> float:
        return self.p

    def summarise(self, keys: Tensor, is_real: Tensor) -> Tensor:
        """Means `[R, H, N, D]`, or bounds `[R, H, N, 2 D]`."""
        return summarise(keys, is_real, self.estimate)

    def weigh(self, blocks: LayerBlocks) -> Tensor:
        """Estimated weights of the blocks, `[R, H, G W, N]`, which sum up to 1."""
        assert blocks.summaries is not None
        if self.estimate == "bounds":
            scores = score_bounds(blocks.queries, blocks.summaries)
        else:
            scores = blocks.queries @ blocks.summaries.mT
        # a block of n entries with one score weighs n times as much as one entry; none: -inf
        size = blocks.filled[:, None, None].float().log()
        return (scores.float() * blocks.scale + size).softmax(-1)

    def choose(self, blocks: LayerBlocks) -> Tensor:
        """The union of all queries' blocks, `[R, H, N]` bool."""
        weights = self.weigh(blocks)
        if self.budget >= 1:
            return choose_mass(weights, self.p, blocks.is_kept[:, :, None]).any(2)
        is_candidate = blocks.highest(weights.amax(2), self.budget)  # [R, H, N]
        n_most = self.most(is_candidate.shape[2], blocks.n_own)
        if blocks.reads_back:
            n_most = int(is_candidate.sum(-1).max())
        # candidates in order, and among them some others, which have no weight
        index = is_candidate.to(torch.uint8).topk(n_most, -1).indices.sort(-1).values  # [R, H, C]
        weights = weights.where(is_candidate[:, :, None], 0)
        weights = weights.gather(3, index[:, :, None].expand(-1, -1, weights.shape[2], -1))
        weights = weights / weights.sum(-1, keepdim=True)
        is_kept = blocks.is_kept.expand_as(is_candidate).gather(2, index)
        chosen = choose_mass(weights, self.p, is_kept[:, :, None]).any(2)
        return torch.zeros_like(is_candidate).scatter_(2, index, chosen)

    def most(self, n_blocks: int, n_own: int) -> int:
        return count_highest(n_blocks, n_own, self.budget)
