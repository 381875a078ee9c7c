"""ScaleKV: K. Li et al., "Memory-Efficient Visual Autoregressive Modeling with Scale-Aware KV Cache
Compression", NeurIPS 2025 (arXiv:2505.19602), and its released code. After each scale of an image a
layer is cut to its budget: few layers, the drafters, look at all scales and keep nearly everything,
and the others, the refiners, share what these leave of the budget. A grid of the scale's entries
votes with its attention for the others and stays; the largest vote of `kernel` neighbours counts.

Departures: which layers are drafters is given, not measured by the paper's attention selectivity
index, and is the same at every scale. Counts follow from the released tables' rule, whose numbers
they meet within 3 % (the last scale of Infinity-8B: within 10). Votes are attention weights, where
the released code adds up products of queries and keys. A row's last entry stays. Scales that are no
squares have a grid too, where it takes the last entries; in a text, which has no scales, and where
some of a scale's entries are left out, those are the grid here as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import isqrt

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from mmaccel.checks import within
from mmaccel.reduction.kv_cache.contract import CachedLayer, CacheMethod, budget_above


@dataclass(frozen=True)
class ScaleKV(CacheMethod):
    """Keeps what a grid of a scale's entries attends to, and nearly all in a few layers.

    Args:
        budget: entries that each row keeps in a layer after a scale, in the mean of all layers.
        window: entries of the grid, a square number; they stay.
        kernel: neighbours whose largest vote counts, an odd number.
        drafters: numbers of the layers that keep all, as far as the budget goes.
        least: share of the budget that other layers keep in any case.

    Loses: the earlier scales, in the layers that are no drafters.
    Figures: `scenes-var`, 64 captions, 30 % of the entries: 40.6 % of captions whole at guidance 1
    and 46.9 % at 2 (39.1 and 60.9 % with all), 20.3 and 35.9 % where they are drawn at random; 0.79
    to 0.90 times as fast.
    """

    budget: int = budget_above("window", 650)
    window: int = within(16, 1, hint="16 is the authors'")
    kernel: int = within(5, 1, hint="5 is the authors'", odd=True)
    drafters: tuple[int, ...] = within((0,), hint="give numbers of layers, as (0, 23)")
    least: float = within(0.25, 0, 1, "0.25 suits most models")

    @property
    def observed(self) -> int:
        return self.window

    @property
    def n_recent(self) -> int:
        return 1

    def observe(self, rows: int, columns: int) -> Sequence[int]:
        """The entries in the middle of equal parts; the last ones where they form no grid."""
        n = isqrt(self.window)
        if n * n != self.window or min(rows, columns) < n:
            return super().observe(rows, columns)
        steps = rows // n, columns // n
        places = product(*([i * step + (step - 1) // 2 for i in range(n)] for step in steps))
        return [row * columns + column for row, column in places]

    def count(self, layer: CachedLayer) -> Tensor:
        seen = layer.lengths if layer.seen is None else layer.seen
        n = sum(index in self.drafters for index in range(layer.depth))
        others = layer.depth - n
        least = max(int(self.least * self.budget), self.window + 1)
        share = seen.clamp(max=(self.budget * layer.depth - others * least) // max(n, 1))
        if layer.index not in self.drafters:
            share = (self.budget * layer.depth - n * share) // others
        return layer.lengths.minimum(share)

    def score(self, layer: CachedLayer) -> Tensor:
        """The largest votes of neighbours, `[R, H, S]`; the grid is best."""
        is_grid = ~layer.before(self.window)  # [R, 1, S]
        if layer.asked is not None:
            marks = torch.zeros_like(layer.keys[:, :1, :, 0], dtype=torch.bool)
            is_grid = marks.scatter(2, layer.asked[:, None], True)
        votes = layer.mass().masked_fill(is_grid, 0)
        votes = max_pool1d(votes, self.kernel, 1, self.kernel // 2)
        return votes.masked_fill(is_grid, float("inf"))
