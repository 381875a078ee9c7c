"""TidalDecode: L. Yang et al., ICLR 2025 (arXiv:2410.05076), section 3. Two layers attend to
everything and remember the highest scores; the layers after each of them read what it has found.

Departures: the paper chooses tokens for each query head; here a block counts with the highest score
of its entries, for any query of the window and any query head that reads the key head
(SmolLM2-135M, 13 questions: tokens 8 and 3 right at a half and a quarter, blocks 6 and 2). Nothing
is recomputed with full attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmaccel.checks import within
from mmaccel.reduction.sparse_attention.contract import (
    AttentionMethod,
    LayerBlocks,
    count_highest,
)

_HINT = "give a layer in the middle of the model, after first_layer"


@dataclass(frozen=True)
class TidalDecode(AttentionMethod):
    """Reads the blocks that the last choosing layer found.

    Args:
        first_layer: the first layer that chooses; it and those before it attend to everything.
        reselect: the layer that chooses anew and attends to everything, too; a model without it
            keeps the first choice. The best one differs from model to model: of 13 questions that
            SmolLM2-135M (30 layers) answers, a quarter of the blocks leaves 2 right with 13, 7 with
            17 or 21, 11 with 18.

    Loses: in models of few layers, and with another layer than the model's: try some with `mmaccel
    evaluate cache`. Refused beside eviction.
    Figures: SmolLM2-135M: 40 % right at 1/4; `reselect=18` has 98, 90 and 79 at 1/2, 1/4, 1/10.
    """

    reselect: int = within(13, "first_layer", hint=_HINT, above_low=True)

    shares_layers: ClassVar[bool] = True

    def source(self, layer: int) -> int:
        return self.reselect if layer >= self.reselect else self.first_layer

    def reads_all(self, layer: int) -> bool:
        return layer <= self.first_layer or layer == self.reselect

    def choose(self, blocks: LayerBlocks) -> Tensor:
        scores = (blocks.queries @ blocks.keys.mT).amax(2)  # [R, H, S]
        scores = scores.masked_fill(~blocks.is_real[:, None], float("-inf"))
        return blocks.highest(blocks.by_block(scores, float("-inf")).amax(-1), self.budget)

    def most(self, n_blocks: int, n_own: int) -> int:
        return count_highest(n_blocks, n_own, self.budget)
