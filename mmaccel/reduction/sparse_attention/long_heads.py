"""LongHeads: Y. Lu et al., 2024 (arXiv:2402.10685), section 2. The entries of a block attend to
each other, the mean of what they get is a query, and the representative is what this query gets of
the block's keys.

Departures: the published code lets the mean of attended *values* query the keys; here what is
attended to are keys in both steps, and keys attend in place of cached tokens' queries. Positions
stay, where the paper renumbers them to read longer texts. The list is that of a key head, and a
block counts with the best query that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmaccel.reduction.sparse_attention.contract import BlockScorer


@dataclass(frozen=True)
class LongHeads(BlockScorer):
    """Reads, for each head, the blocks whose representative key matches a query best.

    Loses: one key among others that point elsewhere; texts longer than the model's.
    Figures: SmolLM2-135M: 66 % right at 1/4.
    """

    summary = "given"

    def summarise(self, keys: Tensor, is_real: Tensor) -> Tensor:
        """Representative keys `[R, H, N, D]`."""
        states = keys.float().where(is_real, 0)
        scale = keys.shape[-1] ** -0.5
        # finite, so that a block that holds nothing has numbers; what it holds is zeros
        hidden = (~is_real).mT * -1e9  # [R, 1, N, 1, P]
        attended = (states @ states.mT * scale + hidden).softmax(-1) @ states  # [R, H, N, P, D]
        n_real = is_real.sum(3, keepdim=True).clamp(min=1)
        query = attended.where(is_real, 0).sum(3, keepdim=True) / n_real  # [R, H, N, 1, D]
        weights = (query @ states.mT * scale + hidden).softmax(-1)
        return (weights @ states).squeeze(3).to(keys.dtype)
