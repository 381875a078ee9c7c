"""Sparse attention carried out: summaries of blocks that follow the cache, and the blocks chosen.

A pass overwrites cache indices from its `start` on, so that only the blocks from there to the
window's end are summarised anew; blocks behind the end hold nothing, whatever an earlier window had
there. So a rollback needs no work of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.kernels.window_attention import Blocks
from mmaccel.reduction.sparse_attention.contract import AttentionMethod


class SparseBlocks:
    """The blocks that the layers of one run attend to.

    Args:
        method: chooses them.
    """

    def __init__(self, method: AttentionMethod) -> None:
        self.method = method
        self._summaries: dict[int, Tensor] = {}  # by layer, [R, H, N + 1, C]; the last is scratch

    def choose(self, layer: int, query: Tensor, key: Tensor, start: Tensor) -> Blocks | None:
        """The blocks of a pass in a layer; None for all.

        Args:
            layer: its number.
            query: `[R, Hq, W, D]`.
            key: `[R, Hkv, S, D]`, what the layer holds, the window's own keys included.
            start: `[R]` int64, cache index of each row's first query.
        """
        method, width = self.method, query.shape[2]
        if layer < method.first_layer or method.budget == 1:
            return None
        summaries = self._follow(layer, key, start, width)
        ends = start + width
        counts = (ends + method.block - 1) // method.block  # [R], blocks that hold something
        block = torch.arange(summaries.shape[2], device=key.device)
        scores = method.score(query.unflatten(1, (key.shape[1], -1)).flatten(2, 3), summaries)
        scores = scores.masked_fill(block >= counts[:, None, None], float("-inf"))

        # the first block, and those of the window itself
        own = (block >= (start // method.block)[:, None]) & (block < counts[:, None])
        is_kept = (own | (block == 0))[:, None]
        chosen = method.select(scores, is_kept, counts)
        count = chosen.sum(-1)
        most = int(count.max())
        if most == summaries.shape[2]:
            return None
        index = chosen.to(torch.uint8).topk(most, -1).indices  # those that are chosen come first
        return Blocks(index.int(), count.int(), method.block)

    def _follow(self, layer: int, key: Tensor, start: Tensor, width: int) -> Tensor:
        """Summaries `[R, H, N, C]` of what a layer holds after the pass has written."""
        method, capacity = self.method, key.shape[2]
        size = method.block
        n_blocks = -(-capacity // size)
        known = self._summaries.get(layer)
        if known is None or len(known) != len(key):
            first = torch.zeros_like(start)
            n_new = n_blocks
        else:
            first = start // size
            n_new = (width + size - 2) // size + 1
        blocks = first[:, None] + torch.arange(n_new, device=key.device)  # [R, n]
        at = blocks[..., None] * size + torch.arange(size, device=key.device)  # [R, n, P]
        is_real = (at < (start + width)[:, None, None]) & (at < capacity)
        row = torch.arange(len(key), device=key.device)[:, None, None]
        found = key.transpose(1, 2)[row, at.clamp(max=capacity - 1)]  # [R, n, P, H, D]
        made = method.summarise(found.permute(0, 3, 1, 2, 4), is_real[:, None, ..., None])
        if known is None or len(known) != len(key):
            known = made.new_zeros(*made.shape[:2], n_blocks + 1, made.shape[3])
        elif known.shape[2] <= n_blocks:  # the cache has grown
            grown = known.new_zeros(*known.shape[:2], n_blocks + 1, known.shape[3])
            grown[:, :, : known.shape[2] - 1] = known[:, :, :-1]
            known = grown
        target = blocks.clamp(max=known.shape[2] - 1)[:, None, :, None].expand_as(made)
        known.scatter_(2, target, made)
        self._summaries[layer] = known
        return known[:, :, :n_blocks]
