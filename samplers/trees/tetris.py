"""TETRIS: one budget of nodes for all rows of a batch.

Z. Wu, Z. Zhou, A. Verma, A. Prakash, D. Rus, B. K. H. Low, "TETRIS: Optimal Draft Token Selection
for Batch Speculative Decoding", ACL 2025 (arXiv 2502.15197): of the drafts of all rows those with
the largest product of chances of acceptance on their path are verified.

Departures: nodes of trees instead of the drafts of chains; the chains themselves are always
verified. A row has room for `nodes` of them; of those left out nothing else is computed, but by
models without mixed passes. How many passes a row takes depends on other rows: bitwise policies
alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.checks import within
from mmaccel.samplers.trees.dyspec import DySpec


@dataclass(frozen=True)
class TETRIS(DySpec):
    """One budget of nodes for all rows of a batch: the likeliest nodes of all of them together.

    Args:
        nodes: the most of a row.
        budget: nodes a row in the mean over the batch.

    Loses: in batches of one; models without mixed passes and `fused="exact"` compute `nodes` of
    every row.
    Figures: `scenes`, window 64, 64 nodes a row in the mean: 7.8 tokens a pass.
    """

    nodes: int = within(48, 1, 1024, "48 suits a window of 32")
    budget: int = within(24, 1, "nodes", "half of nodes suits most")

    name = "tetris"
    only_bitwise = True

    def is_needed(self, chances: Tensor) -> Tensor:
        """The likeliest of the batch, parents before their children."""
        is_best = torch.zeros_like(chances, dtype=torch.bool)
        is_best.view(-1)[self.find_wanted(chances)] = True
        return is_best & super().is_needed(chances)

    def find_wanted(self, chances: Tensor) -> Tensor:
        """As many as the budget, of which some may be no nodes."""
        order = chances.flatten().sort(descending=True, stable=True).indices
        return order[: self.budget * len(chances)]
