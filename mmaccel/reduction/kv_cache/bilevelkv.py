"""BiLevelKV: M. Qin et al., "Video-XL-2", 2025 (arXiv:2506.19225), section 3 (bi-level key-value
decoding).

Departures: the paper is told which chunks are relevant, and processes the video twice; here the
attention of the prompt's last entries decides, in each layer for all heads together, as many chunks
as the budget holds, and neighbours are averaged as they are cached, once. A mean of n entries
receives the attention of one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.checks import within
from mmaccel.reduction.kv_cache.contract import CachedLayer, MergingMethod, mean_of_chunks


@dataclass(frozen=True)
class BiLevelKV(MergingMethod):
    """Keeps means of neighbours, and the chunks whole that a prompt's last entries attend to.

    Args:
        chunk: entries of a chunk, a multiple of `pool`.
        pool: neighbouring entries that become one where their chunk is not relevant.
        question: the last entries, which decide and stay.

    Loses: where a prompt does not end with the question.
    Figures: SmolLM2-135M: 67, 21, 1 % right at 1/2, 1/4, 1/10.
    """

    chunk: int = within(256, 2, hint="give the tokens of a few frames", multiple_of="pool")
    pool: int = within(8, 2, hint="8 suits most; fewer are more exact")
    question: int = within(32, 1, hint="give the tokens of a question")

    @property
    def observed(self) -> int:
        return self.question

    def score(self, layer: CachedLayer) -> Tensor:
        """`[R, 1, S]`: the last entries of groups first, then whole chunks by their relevance."""
        is_asked = layer.before(self.question)
        mass = layer.mass().sum(1, keepdim=True)  # [R, 1, S]
        relevance = mean_of_chunks(mass, is_asked, self.chunk)
        scores = relevance / relevance.amax(2, keepdim=True).clamp(min=1e-20)  # in 0..1
        is_last = (layer.at % self.pool == self.pool - 1) | ~layer.before(self.question + 1)
        return torch.where(is_last & is_asked, scores + 2, scores)

    def merge(self, layer: CachedLayer, keep: Tensor) -> tuple[Tensor, Tensor]:
        heads, size = layer.keys.shape[1:3]
        is_asked = layer.before(self.question)
        joins = (is_asked & ~self.mark(keep, size))[..., None]
        last = keep % self.pool == self.pool - 1
        last = last | (keep == layer.lengths[:, None, None] - self.question - 1)
        last = (last & is_asked.gather(2, keep.clamp(min=0)))[..., None]
        at = (keep.clamp(min=0) // self.pool)[..., None]  # [R, 1, K, 1], the group of each
        n_joined = self._add(joins.float()).gather(2, at)  # [R, 1, K, 1]
        merged = []
        for states in (layer.keys, layer.values):
            wide = (-1, heads, -1, states.shape[3])
            kept = states.gather(2, keep.clamp(min=0)[..., None].expand(*wide)).float()
            joined = self._add(states.float().where(joins, 0)).gather(2, at.expand(*wide))
            mean = (kept + joined) / (n_joined + 1)
            merged.append(mean.where(last, kept).to(states.dtype))
        return merged[0], merged[1]

    def _add(self, states: Tensor) -> Tensor:
        """Sums of groups, `[..., S / pool, D]` of `[..., S, D]`."""
        surplus = -states.shape[2] % self.pool
        return pad(states, (0, 0, 0, surplus)).unflatten(2, (-1, self.pool)).sum(3)
