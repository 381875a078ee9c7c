"""H2O: Z. Zhang et al., NeurIPS 2023 (arXiv:2306.14048), section 4 and algorithm 1. An entry's
score is the attention that it has received from all queries so far; half of the budget is for the
last ones.

Departures: the paper evicts one entry for every new token; here entries go when the prompt is
processed, and in rounds of `every` tokens. Query heads vote together for their key head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmaccel.checks import within
from mmaccel.reduction.kv_cache.contract import CachedLayer, CacheMethod


@dataclass(frozen=True)
class H2O(CacheMethod):
    """Keeps what the whole prompt attends to, and the last entries.

    Args:
        recent: share of the budget for the last entries, 0 to 1; at least one stays.

    Cost: the prompt's attention a second time, 64 queries at a time.
    Loses: what the end asks for: early entries are seen by more queries.
    Figures: SmolLM2-135M: 46, 33, 21 % right at 1/2, 1/4, 1/10.
    """

    recent: float = within(0.5, 0, 1, "0.5 is the paper's")

    accumulates: ClassVar[bool] = True

    @property
    def n_recent(self) -> int:
        return max(1, int(self.budget * self.recent))

    def score(self, layer: CachedLayer) -> Tensor:
        assert layer.total is not None
        return layer.total
