"""ActQKV: one probe query speaks for a window, made of the tokens that stand out from it.

Q. Xiao et al., "Activation-aware Probe-Query: Effective Key-Value Retrieval for Long-Context LLMs
Inference", 2025 (arXiv:2502.13542), section 3. The activation bias of a token is the squared
distance of its query from the window's mean, divided by the variance. The probe is the mean of the
window's queries, weighted by it; blocks are ranked by the product of the probe and their mean key.

Departures: the paper ranks the blocks of single windows of a prompt; here the windows are those of
decoding, and the prompt attends to everything. Each query head has a probe, and a block counts with
the best of those that read its key head. Where all queries are alike, as in a window of one, the
probe is their mean. The paper's budget that differs from layer to layer is left out: it needs the
scores of all layers before the first one attends.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmaccel.reduction.sparse_attention.contract import BlockScorer, LayerBlocks

_LEAST = 1e-6  # of variances and biases


@dataclass(frozen=True)
class ActQKV(BlockScorer):
    """Reads the blocks whose mean key matches the window's probe query best.

    Args:
        budget, block, first_layer: as for every method.
    """

    def summarise(self, keys: Tensor, is_real: Tensor) -> Tensor:
        """Mean keys of the blocks, `[R, H, N, D]`."""
        sums = keys.float().where(is_real, 0).sum(3)
        return (sums / is_real.sum(3).clamp(min=1)).to(keys.dtype)

    def score(self, queries: Tensor, summaries: Tensor) -> Tensor:
        """The largest product of each block's summary with a query, `[R, H, N]`."""
        return (queries @ summaries.mT).amax(2)

    def probe(self, queries: Tensor) -> Tensor:
        """Probes `[R, H, G, D]` of the queries `[R, H, G, W, D]` of a window."""
        states = queries.float()
        mean = states.mean(3, keepdim=True)
        distance = (states - mean).square()
        variance = distance.mean(3, keepdim=True)  # [R, H, G, 1, D]
        bias = (distance / (variance + _LEAST)).mean(-1, keepdim=True) + _LEAST  # [R, H, G, W, 1]
        return ((bias * states).sum(3) / bias.sum(3)).to(queries.dtype)

    def choose(self, blocks: LayerBlocks) -> Tensor:
        """The blocks that match the probes best, `[R, H, N]` bool."""
        assert blocks.summaries is not None
        probes = self.probe(blocks.queries.unflatten(2, (-1, blocks.width)))
        return blocks.highest(self.score(probes, blocks.summaries), self.budget)
