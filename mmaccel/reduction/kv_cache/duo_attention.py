"""DuoAttention: G. Xiao et al., ICLR 2025 (arXiv:2410.10819), section 2: retrieval heads look up
anything in a text, streaming heads attend to its first entries and the most recent ones.

Departures: the paper finds a model's retrieval heads once, by training gates. Here each prompt
calibrates, row by row: a key head is a retrieval head if the queries of the last `window` entries
give more than `share` of their attention, in the mean, to what a streaming head would drop. Entries
go once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmaccel.checks import within
from mmaccel.reduction.kv_cache.contract import CachedLayer, budget_above
from mmaccel.reduction.kv_cache.headwise import HeadwiseMethod


@dataclass(frozen=True)
class DuoAttention(HeadwiseMethod):
    """Keeps all entries of heads that look far back, and of the others the first and the last.

    Args:
        budget: entries that a streaming head keeps.
        sinks: how many of them are the first ones, fewer than the budget.
        share: of their attention, from which on a head is a retrieval head.
        window: how many of the last queries are looked at.

    Loses: where one prompt's end looks nowhere; a smaller budget makes more heads look past it, and
    those keep all.
    Figures: SmolLM2-135M: 87, 91 % right at budgets of 1/2, 1/4, which left 71, 76 % of the
    entries.
    """

    budget: int = budget_above("sinks", 384)
    sinks: int = within(128, hint="128 suits most models")
    share: float = within(0.1, 0, 1, "0.1 suits most models")
    window: int = within(64, 1, hint="64 suits most models")

    remembers: ClassVar[bool] = True

    @property
    def observed(self) -> int:
        return self.window

    @property
    def n_recent(self) -> int:
        return self.budget - self.sinks

    def remember(self, layer: CachedLayer) -> Tensor:
        """1 and a head's share of attention for what streaming drops, `[R, H, S]`, 0 if it drops
        none.
        """
        if layer.total is None:
            known = layer.keys.new_zeros(*layer.keys.shape[:2], 1, dtype=torch.float32)
        else:
            known = layer.total.amax(-1, keepdim=True)
        is_long = layer.lengths[:, None, None] > self.budget
        mass = layer.mass().where(layer.is_entry(), 0)
        far = mass.masked_fill(self._is_end(layer), 0).sum(-1, keepdim=True)
        share = far / mass.sum(-1, keepdim=True).clamp(min=1e-6)
        known = torch.where(is_long & (known == 0), 1 + share, known)
        return known.expand_as(mass).contiguous()

    def score(self, layer: CachedLayer) -> Tensor:
        assert layer.total is not None
        return layer.total

    def keeps(self, layer: CachedLayer, scores: Tensor) -> Tensor:
        return self._is_end(layer) | (scores.amax(-1, keepdim=True) > 1 + self.share)

    def _is_end(self, layer: CachedLayer) -> Tensor:
        """`[R, 1, S]` bool, what a streaming head keeps."""
        return (layer.at < self.sinks) | ~layer.before(self.n_recent)
