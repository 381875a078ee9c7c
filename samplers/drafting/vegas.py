"""Vegas: the blocks that the last verifying pass attended to are those that drafts read.

Y. Yue, Y. Xue, J. Huang, "Vegas: Self-Speculative Decoding with Verification-Guided Sparse
Attention", ICML 2026 (arXiv:2602.07223).

Departures: blocks are chosen and not single entries, by the attention that they receive from all
queries of the pass and all query heads of a key head; the first block, those of the verifying pass
and those written since are read in any case. A CPU computes the scores of the verifying pass twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmaccel.checks import within
from mmaccel.samplers.drafting.self_draft import SelfDrafting


@dataclass(frozen=True)
class Vegas(SelfDrafting):
    """Drafts of the model itself over the blocks that the last verifying pass attended to most.

    Args:
        budget: the fraction of a row's blocks that drafts read, in (0, 1].
        block: entries of a block.

    Loses: in short contexts, where a draft costs all weights and saves no reading; on a CPU. Before
    the first verification drafts attend to everything. Refused beside `attention=` and where all
    layers slide or one is recurrent; `kv_cache=` goes with it, but for rounds and heads of
    different lengths.
    Figures: random weights, 32768 positions, two cores: 0.62 to 0.76 times as fast as the plain
    loop.
    """

    budget: float = within(0.07, 0, 1, "try 0.07", above_low=True)
    block: int = within(16, 1, hint="16 suits most models")

    name = "vegas"

    @property
    def attention(self) -> Vegas:
        """No method of attention: the verifying pass chooses by budget and block."""
        return self
