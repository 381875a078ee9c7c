"""PyramidKV: Z. Cai et al., 2024 (arXiv:2406.02069), section 4. Budgets fall from layer to layer by
equal steps. Their mean is the budget, and the last layer has 1 / `slope` of it, beside the
observation window.

Departures: those of SnapKV. A row that is shorter than the first layer's budget gets what it has
there, and the last layer what that saves, as in the authors' code; so that rows of the budget's
length keep everything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.checks import within
from mmaccel.reduction.kv_cache.contract import CachedLayer
from mmaccel.reduction.kv_cache.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """Keeps what the last entries of the prompt attend to, more of it in lower layers.

    Args:
        budget: entries that each row keeps in a layer in the mean, the observation window among
            them.
        slope: how many times the mean budget is that of the last layer, beside the window; 1 gives
            all layers the same.

    Loses: where higher layers look for many things; the first layers hold nearly twice the mean.
    Figures: SmolLM2-135M: 96, 85, 52 % right at 1/2, 1/4, 1/10.
    """

    slope: int = within(20, 1, hint="20 is the paper's")

    def count(self, layer: CachedLayer) -> Tensor:
        lengths = layer.lengths
        mean = self.budget - self.window
        room = (lengths - self.window).clamp(min=mean)
        first = room.clamp(max=2 * mean - mean // self.slope)
        last = 2 * mean - first
        steps = max(layer.depth - 1, 1)
        place = layer.index if layer.depth > 1 else 0.5
        count = (first - (first - last) * place / steps).round().long()
        return torch.where(lengths <= self.budget, lengths, self.window + count)
