"""HiP: H. Lee et al., ICLR 2025 (arXiv:2406.09827), section 3. The key in the middle of a chunk
speaks for it. A row is cut into 2k chunks; the k with the best middle keys are cut in half, and so
on.

Departures: chunks end at single blocks and not at single tokens. The queries of a window, and of
all query heads that read a key head, descend together: a chunk counts with its best score. The
first block and those of the window are read in addition. The prompt attends to everything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.reduction.sparse_attention.contract import AttentionMethod, LayerBlocks


@dataclass(frozen=True)
class HiP(AttentionMethod):
    """Reads the blocks that a descent from chunk to half chunk finds.

    Args:
        budget: the fraction of a row's blocks that are found, in (0, 1]; 1 changes nothing.

    Loses: keys whose neighbours are unlike them; at large budgets; on a GPU, where steps of a
    descent follow each other.
    Figures: SmolLM2-135M: 57 % right at 1/4.
    """

    def choose(self, blocks: LayerBlocks) -> Tensor:
        """The blocks that are found, and those that are kept, `[R, H, N]` bool. Cost: scores of `2
        k` keys a step, and as many steps as a chunk can be halved.
        """
        rows, heads = blocks.keys.shape[:2]
        n_blocks = blocks.holds.shape[1]
        number = torch.arange(n_blocks, device=blocks.keys.device)
        span = (blocks.holds * (number + 1)).amax(1)[:, None]  # [R, 1], blocks up to the last
        k = (blocks.counts * self.budget).ceil().long().clamp(min=1)[:, None]  # [R, 1]
        most = min(int(n_blocks * self.budget) + 1, n_blocks)

        # chunks of the blocks low ... high - 1; those behind a row's 2k are empty
        edge = torch.arange(2 * most + 1, device=span.device).clamp(max=2 * k)
        edges = (edge * span // (2 * k))[:, None].expand(-1, heads, -1)
        low = edges[..., :-1]  # [R, H, 2 k]
        high = edges[..., 1:]
        rank = torch.arange(most, device=span.device)
        for _ in range(n_blocks.bit_length()):
            scores = self._score(blocks, low, high)  # the k best are cut in half
            ranked = scores.sort(dim=-1, descending=True, stable=True)  # ties alike in any batch
            is_best = (rank < k)[:, None] & (ranked.values[..., :most] > float("-inf"))
            low = low.gather(2, ranked.indices[..., :most])
            high = high.gather(2, ranked.indices[..., :most]).where(is_best, low)
            middle = (low + high + 1) // 2
            low, high = torch.cat([low, middle], 2), torch.cat([middle, high], 2)
        is_found = torch.zeros(rows, heads, n_blocks, dtype=torch.int64, device=low.device)
        is_found.scatter_add_(2, low.clamp(max=n_blocks - 1), (low < high).long())
        return (is_found > 0) | blocks.is_kept

    def most(self, n_blocks: int, n_own: int) -> int:
        return min(int(n_blocks * self.budget) + 2 + n_own, n_blocks)

    def _score(self, blocks: LayerBlocks, low: Tensor, high: Tensor) -> Tensor:
        """`[R, H, n]`, the best score of a chunk's middle key; -inf of empty chunks."""
        middle = (low + high) * blocks.size // 2
        last = blocks.is_real.sum(1) - 1  # [R]
        middle = torch.minimum(middle, last[:, None, None])  # a last block may be filled in part
        index = middle.clamp(min=0)[..., None].expand(-1, -1, -1, blocks.keys.shape[3])
        scores = (blocks.queries @ blocks.keys.gather(2, index).mT).amax(2)
        return scores.masked_fill(low >= high, float("-inf"))
