"""ChunkKV: X. Liu et al., 2025 (arXiv:2502.00299), section 3. The votes of an observation window,
of all heads together, are averaged over chunks, and the best chunks stay whole. Neighbouring layers
choose alike, so that one may choose for several.

Departures: those of SnapKV. What whole chunks leave of the budget is filled with the beginning of
the next best one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmaccel.checks import within
from mmaccel.reduction.kv_cache.contract import (
    CachedLayer,
    CacheMethod,
    budget_above,
    mean_of_chunks,
)


@dataclass(frozen=True)
class ChunkKV(CacheMethod):
    """Keeps the chunks of the prompt that its last entries attend to.

    Args:
        chunk: entries of a chunk; of an image, the tokens of a row.
        window: entries of the observation window.
        reuse: how many layers, one after the other, keep what the first of them chooses.

    Loses: one important entry among unimportant ones; chunks begin at multiples of `chunk`.
    Figures: SmolLM2-135M: 97, 93, 72 % right at 1/2, 1/4, 1/10.
    """

    budget: int = budget_above("window")
    chunk: int = within(10, 1, hint="10 suits text")
    window: int = within(32, 1, hint="32 suits most models")
    reuse: int = within(1, 1, hint="1 lets every layer choose")

    @property
    def observed(self) -> int:
        return self.window

    @property
    def shared_layers(self) -> int:
        return self.reuse

    def score(self, layer: CachedLayer) -> Tensor:
        """Votes of an entry's chunk, `[R, 1, S]`."""
        votes = layer.mass().sum(1, keepdim=True)
        return mean_of_chunks(votes, layer.before(self.window), self.chunk)
