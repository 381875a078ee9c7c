"""A random choice of visual tokens: a control, the baseline of UniPruneBench (arXiv:2511.02650).

Departures: none in the choice. By a counter-based generator a row's choice depends on its seed and
its number of tokens, not on the batch, the padding or the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmaccel.reduction.visual_tokens.context import VisualContext
from mmaccel.reduction.visual_tokens.contract import TokenReducer
from mmaccel.reduction.visual_tokens.selection import random_uniforms


@dataclass(frozen=True)
class RandomTokens(TokenReducer):
    """Keeps a random subset, by the seed and a token's place alone: a control.

    Figures: `scenes-vqa`, 22 % kept: 10.3 points lost of 97.0.
    """

    def score(self, context: VisualContext) -> Tensor:
        """Uniform random numbers, `[B, N]`."""
        return random_uniforms(context.seeds, context.valid)
