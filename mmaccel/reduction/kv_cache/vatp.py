"""VATP: Z. Guo, H. Kamigaito, T. Watanabe, EMNLP 2024 (arXiv:2406.12335), section 4. H2O's
attention is multiplied by the l1 norm of the value. The first entries, which attract much attention
and have tiny values, stay in any case.

Departures: those of H2O.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmaccel.checks import within
from mmaccel.reduction.kv_cache.contract import CachedLayer
from mmaccel.reduction.kv_cache.h2o import H2O


@dataclass(frozen=True)
class VATP(H2O):
    """Keeps what the whole prompt attends to and has a large value, the first and the last entries.

    Args:
        sinks: how many of the first entries stay; the budget holds them beside the last ones.

    Loses: what `H2O` loses.
    Figures: SmolLM2-135M: 44, 33, 13 % right at 1/2, 1/4, 1/10.
    """

    sinks: int = within(20, 0, "room", "give a larger budget or fewer sinks")

    @property
    def room(self) -> int:
        """What the budget leaves beside the last entries."""
        return self.budget - self.n_recent

    def score(self, layer: CachedLayer) -> Tensor:
        """Attention times the value's norm, `[R, H, S]`; the first entries are best."""
        norms = layer.values.float().norm(p=1, dim=-1)
        return (super().score(layer) * norms).masked_fill(layer.at < self.sinks, float("inf"))
