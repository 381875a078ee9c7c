"""CItruS: Y. Bai et al., EMNLP 2024 (arXiv:2406.12018), section 3. All heads keep the same entries.

Departures: the paper feeds a document in chunks, lets the instruction vote after each, and may hold
a second cache for the flow of the text. Here it votes once, behind the whole prompt, and stays.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmaccel.checks import within
from mmaccel.reduction.kv_cache.contract import CachedLayer, CacheMethod, budget_above


@dataclass(frozen=True)
class CItruS(CacheMethod):
    """Keeps what the instruction at the end of the prompt attends to in the mean of all heads.

    Args:
        instruction: entries of the instruction, the last ones of the prompt.

    Loses: where questions of a batch differ in length, and where heads look for different things.
    Figures: SmolLM2-135M: 75, 45, 18 % right at 1/2, 1/4, 1/10.
    """

    budget: int = budget_above("instruction")
    instruction: int = within(64, 1, hint="give the tokens of the question")

    @property
    def observed(self) -> int:
        return self.instruction

    def score(self, layer: CachedLayer) -> Tensor:
        """Votes of all heads together, `[R, 1, S]`."""
        return layer.mass().sum(1, keepdim=True)
