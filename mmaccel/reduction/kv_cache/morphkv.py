"""MorphKV: R. Ghadia et al., ICML 2025 (arXiv:2503.00979), section 3. The last `window` entries
stay, and of those before them what they attend to; nothing is added up over a whole text.

Departures: the paper evicts one entry for every new token; here a round of `every` tokens evicts as
many, and what goes is attended to for a round more. Votes of the window are added up (the paper's
sum fusion; its maximum is not offered). Query heads vote together for their key head.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from mmaccel.checks import within
from mmaccel.reduction.kv_cache.contract import CachedLayer, CacheMethod, budget_above


@dataclass(frozen=True)
class MorphKV(CacheMethod):
    """Keeps what the most recent entries attend to, again after every `every` tokens.

    Args:
        every: generated tokens of a round, at least the window of the policy.
        window: how many recent entries stay, and vote.

    Loses: what no recent entry attends to, though a later one would; in short answers. A window
    wider than `every` is refused.
    Figures: SmolLM2-135M: 49, 29, 20 % right at 1/2, 1/4, 1/10.
    """

    every: int | None = field(default=64, kw_only=True)
    budget: int = budget_above("window")
    window: int = within(32, 1, hint="32 suits most models")

    @property
    def observed(self) -> int:
        return self.window

    def score(self, layer: CachedLayer) -> Tensor:
        return layer.mass()
