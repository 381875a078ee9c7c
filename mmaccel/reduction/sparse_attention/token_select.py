"""TokenSelect: W. Wu et al., 2024 (arXiv:2411.02886), sections 4.2 and 4.3. The votes are each
head's softmax.

Departures: the paper chooses tokens; here a block has the votes of its entries. The queries of a
window vote together, and their mean is compared. Blocks of the window itself, and the first block,
are read in any case, in addition to an earlier choice.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import cosine_similarity, pad

from mmaccel.checks import within
from mmaccel.reduction.sparse_attention.contract import (
    AttentionMethod,
    LayerBlocks,
)


@dataclass(frozen=True)
class TokenSelect(AttentionMethod):
    """Reads the blocks that the heads vote for, and those again while queries are similar.

    Args:
        similarity: the least cosine between a pass's mean query and that of the last choice with
            which the choice is read again, in [0, 1]; 1 chooses at every pass.

    Loses: where each pass has to choose, which reads all keys; in batches, unless all rows look
    alike.
    Figures: SmolLM2-135M: 100, 98 % right at 1/4, 1/10.
    """

    similarity: float = within(0.9, 0, 1, "0.9 suits most models; 1 chooses at every pass")

    def choose(self, blocks: LayerBlocks) -> Tensor:
        """The blocks with most votes, alike for all heads: `[R, 1, N]` bool. Cost: scores of all
        keys where a row chooses anew, in captured steps at every pass; a host synchronisation.
        """
        probe = blocks.queries.unflatten(2, (-1, blocks.width)).mean(3).flatten(1)  # [R, H G D]
        last = blocks.last
        if last.chosen is None or last.probe is None or self.similarity >= 1:
            chosen = self._vote(blocks)
        else:
            n_blocks = blocks.holds.shape[1]
            known = pad(last.chosen, (0, max(n_blocks - last.chosen.shape[2], 0)))[..., :n_blocks]
            is_similar = cosine_similarity(probe, last.probe, dim=1) >= self.similarity  # [R]
            probe = last.probe.where(is_similar[:, None], probe)
            chosen = known
            if not (blocks.reads_back and bool(is_similar.all())):
                chosen = known.where(is_similar[:, None, None], self._vote(blocks))
        last.probe = probe
        last.chosen = chosen
        return chosen | blocks.is_kept

    def _vote(self, blocks: LayerBlocks) -> Tensor:
        """The blocks with most votes, `[R, 1, N]` bool."""
        scores = (blocks.queries @ blocks.keys.mT).float() * blocks.scale  # [R, H, G W, S]
        scores = scores.masked_fill(~blocks.is_real[:, None, None], float("-inf"))
        votes = scores.softmax(-1).sum((1, 2))[:, None]  # [R, 1, S]
        return blocks.highest(blocks.by_block(votes, 0).sum(-1), self.budget)
