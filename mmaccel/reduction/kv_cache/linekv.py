"""LineKV: Z. Qin et al., LineAR, 2025 (arXiv:2512.04857). Tokens of an image attend to its
beginning, to the last rows, and to a few between. Neighbouring rows attend alike: when a row is
finished, what it attends to stays.

Departures: written from the paper's description; its code is not public. Each key head chooses
alone. A finished row's last token is processed with the first of the next, so that a round ends one
token before the row does. What goes is attended to for a row more, see `every`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmaccel.checks import within
from mmaccel.reduction.kv_cache.contract import CachedLayer, CacheMethod, budget_above


@dataclass(frozen=True)
class LineKV(CacheMethod):
    """Keeps the first entries, the last rows, and what the last row attends to, row by row.

    Args:
        budget: entries that each row of the batch keeps in a layer.
        every: tokens of a row of the image.
        lines: how many of the last rows stay.
        sinks: how many of the first entries stay: those of the prompt, say.

    Loses: in small images, texts, and batches of prompts of different lengths. Windows wider than a
    row are refused.
    Figures: `scenes`, a quarter kept: 85 % of captions true (whole 89, `KeyDiff` 90, random 38).
    """

    budget: int = budget_above("n_recent + sinks")
    every: int = within(24, 1, 2**16, "give the tokens of a row of the image", kw_only=True)
    lines: int = within(2, 1, hint="2 suits most models")
    sinks: int = within(64, hint="give the prompt's entries")

    @property
    def observed(self) -> int:
        assert self.every is not None
        return self.every

    @property
    def n_recent(self) -> int:
        return self.lines * self.observed

    def score(self, layer: CachedLayer) -> Tensor:
        """Votes of the last row, `[R, H, S]`; the first entries are best."""
        return layer.mass().masked_fill(layer.at < self.sinks, float("inf"))
