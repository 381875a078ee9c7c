"""DHSA, dynamic hierarchical sparse attention (arXiv 2510.24606): chunks by their summed keys.

A chunk's summary is the mean of its keys times the square root of its length, so that long chunks
win neither by their sum nor lose by their mean.

Departures: the paper cuts the text into chunks of changing lengths, at boundaries that a small
trained network predicts; here all blocks have `block` entries, so that of the blocks that are
chosen from none is longer than another. The paper summarises queries by chunks, too, and spreads
the scores of pairs of chunks over their tokens; here each query of a window is compared itself,
and the best one counts. The prompt attends to everything.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmaccel.reduction.sparse_attention.contract import AttentionMethod


@dataclass(frozen=True)
class DHSA(AttentionMethod):
    """Reads the blocks whose length-normalised mean key matches a query best.

    Args:
        budget: the fraction of a row's blocks that a pass attends to, in (0, 1]; 1 changes nothing.
        block: positions of a block.
        first_layer: layers before it attend to everything.

    Raises:
        OptionError: a value out of range.
    """

    def summarise(self, keys: Tensor, is_real: Tensor) -> Tensor:
        """The sum of a block's keys divided by the square root of their number."""
        sums = keys.float().where(is_real, 0).sum(3)
        lengths = is_real.sum(3).clamp(min=1)
        return (sums / lengths.sqrt()).to(keys.dtype)

    def score(self, queries: Tensor, summaries: Tensor) -> Tensor:
        """What the query that wants a block most gives it."""
        return (queries @ summaries.mT).amax(2)
