"""TOVA: M. Oren et al., EMNLP 2024 (arXiv:2401.06104), section 3.2. The entries to which the newest
token attends least, in the mean of all heads, go, wherever they stand.

Departures: the paper evicts one entry for every new token; here entries go when the prompt is
processed, and in rounds of `every` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmaccel.reduction.kv_cache.contract import CachedLayer, CacheMethod


@dataclass(frozen=True)
class TOVA(CacheMethod):
    """Keeps what the last entry attends to in the mean of all heads.

    Loses: where the last entry alone does not ask for all that the question does.
    Figures: SmolLM2-135M: 92, 72, 44 % right at 1/2, 1/4, 1/10.
    """

    @property
    def observed(self) -> int:
        return 1

    def score(self, layer: CachedLayer) -> Tensor:
        """Attention of all heads together, `[R, 1, S]`."""
        return layer.mass().sum(1, keepdim=True)
