"""BiLevelKV: chunks that the question attends to stay whole, of the others means of neighbours.

M. Qin et al., "Video-XL-2: Towards Very Long-Video Understanding Through Task-Aware KV
Sparsification", 2025 (arXiv:2506.19225), section 3 (bi-level key-value decoding). A chunk of a
video that is relevant to the question is read with all its keys and values, another one with those
of a pooled copy.

Departures: the paper is told which chunks are relevant, and processes the video twice; here the
attention of the prompt's last entries decides, in each layer for all heads together, and keys and
values of neighbouring entries are averaged as they are cached: keys with their rotation. Chunks are
counted from the beginning of the prompt. The budget decides how many chunks stay whole; the least
relevant of these may do so in part. A mean of n entries receives the attention of one. All this
happens once, when the prompt is processed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.checks import within
from mmaccel.reduction.kv_cache.contract import CachedLayer, CacheMethod


@dataclass(frozen=True)
class BiLevelKV(CacheMethod):
    """Keeps means of neighbours, and the chunks whole that a prompt's last entries attend to.

    Args:
        budget: entries that each row keeps in a layer, means among them.
        chunk: entries of a chunk, a multiple of `pool`.
        pool: neighbouring entries that become one where their chunk is not relevant.
        question: the last entries, which decide and stay.

    Raises:
        OptionError: a value out of range, chunks that `pool` does not divide, or rounds.
    """

    every: None = within(None, hint="merged entries stay merged; leave it out", kw_only=True)
    chunk: int = within(256, 2, hint="give the tokens of a few frames", multiple_of="pool")
    pool: int = within(8, 2, hint="8 suits most; fewer are more exact")
    question: int = within(32, 1, hint="give the tokens of a question")

    merges: ClassVar[bool] = True

    @property
    def observed(self) -> int:
        """See `CacheMethod`."""
        return self.question

    def score(self, layer: CachedLayer) -> Tensor:
        """`[R, 1, S]`: the last entries of groups first, then whole chunks by their relevance."""
        size = layer.keys.shape[2]
        index = torch.arange(size, device=layer.keys.device)
        is_asked = self._is_asked(layer)
        mass = layer.mass().sum(1, keepdim=True).where(is_asked, 0)  # [R, 1, S]
        filled = pad(is_asked, (0, -size % self.chunk)).unflatten(2, (-1, self.chunk)).sum(3)
        relevance = pad(mass, (0, -size % self.chunk)).unflatten(2, (-1, self.chunk)).sum(3)
        relevance = relevance / filled.clamp(min=1)
        relevance = relevance / relevance.amax(2, keepdim=True).clamp(min=1e-20)  # in 0..1
        scores = relevance.repeat_interleave(self.chunk, 2)[..., :size]
        ends = layer.lengths[:, None, None] - self.question
        is_last = (index % self.pool == self.pool - 1) | (index == ends - 1)
        return torch.where(is_last & is_asked, scores + 2, scores)

    def merge(self, layer: CachedLayer, keep: Tensor) -> tuple[Tensor, Tensor]:
        """See `CacheMethod`."""
        heads, size = layer.keys.shape[1:3]
        stays = torch.zeros(len(keep), 1, size + 1, dtype=torch.bool, device=keep.device)
        stays = stays.scatter(2, keep.where(keep >= 0, size), True)[..., :size]
        joins = (self._is_asked(layer) & ~stays)[..., None]
        last = keep % self.pool == self.pool - 1
        last = last | (keep == layer.lengths[:, None, None] - self.question - 1)
        last = (last & self._is_asked(layer).gather(2, keep.clamp(min=0)))[..., None]
        at = (keep.clamp(min=0) // self.pool)[..., None]
        n_joined = self._add(joins.float()).gather(2, at)  # [R, 1, K, 1]
        made = []
        for states in (layer.keys, layer.values):
            wide = (-1, heads, -1, states.shape[3])
            own = states.gather(2, keep.clamp(min=0)[..., None].expand(*wide)).float()
            joined = self._add(states.float().where(joins, 0)).gather(2, at.expand(*wide))
            mean = (own + joined) / (n_joined + 1)
            made.append(mean.where(last, own).to(states.dtype))
        return made[0], made[1]

    def _is_asked(self, layer: CachedLayer) -> Tensor:
        """`[R, 1, S]` bool, entries before the question."""
        index = torch.arange(layer.keys.shape[2], device=layer.keys.device)
        return index < (layer.lengths - self.question)[:, None, None]

    def _add(self, states: Tensor) -> Tensor:
        """Sums of groups, `[..., S / pool, D]` of `[..., S, D]`."""
        surplus = -states.shape[2] % self.pool
        return pad(states, (0, 0, 0, surplus)).unflatten(2, (-1, self.pool)).sum(3)
