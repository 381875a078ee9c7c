"""Sparse attention carried out: summaries of blocks that follow the cache, and the blocks chosen.

A window overwrites cache indices from its `start` on, so that only the blocks from there to the
window's end are summarised anew; blocks behind the end hold nothing, whatever an earlier window had
there. So a rollback needs no work of its own. A pass that says what it reads is summarised anew in
the blocks that it writes; blocks of which it reads nothing hold nothing.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mmaccel.kernels.window_attention import Blocks
from mmaccel.reduction.sparse_attention.contract import AttentionMethod


class BlockChooser(Protocol):
    """Chooses the blocks that a pass attends to in a layer."""

    def choose(
        self, layer: int, query: Tensor, key: Tensor, start: Tensor, *, scale: float
    ) -> Blocks | None:
        """The blocks of a window in a layer; None for all.

        Args:
            layer: its number.
            query: `[R, Hq, W, D]`.
            key: `[R, Hkv, S, D]`, what the layer holds, the window's own keys included.
            start: `[R]` int64, cache index of each row's first query.
            scale: of the scores.
        """
        ...


class SparseBlocks:
    """The blocks that the layers of one run attend to.

    Args:
        method: chooses them.
    """

    def __init__(self, method: AttentionMethod) -> None:
        self.method = method
        self._summaries: dict[int, Tensor] = {}  # by layer, [R, H, N + 1, C]; the last is scratch

    def choose(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        start: Tensor,
        *,
        scale: float,
        since: Tensor | None = None,
    ) -> Blocks | None:
        """See `BlockChooser.choose`.

        Args:
            layer, query, key, start, scale: as there.
            since: `[R]` int64, at most `start`: from there on others may have written; None:
                nobody has. Cost: a host synchronisation.
        """
        width = query.shape[2]
        size = self.method.block
        if not self._chooses(layer):
            return None
        n_new = (width + size - 2) // size + 1
        first = start // size
        if since is not None:
            n_new += int((first - since // size).max())
            first = since // size
        written = first[:, None] + torch.arange(n_new, device=key.device)  # [R, n]
        ends = (start + width)[:, None]
        is_real = torch.arange(key.shape[2], device=key.device) < ends  # [R, S]
        n_blocks = -(-key.shape[2] // size)
        block = torch.arange(n_blocks, device=key.device)
        own = (block >= start[:, None] // size) & (block < (ends + size - 1) // size)
        return self._choose(layer, query, key, written=written, is_real=is_real, own=own)

    def choose_read(
        self, layer: int, query: Tensor, key: Tensor, indices: Tensor, reads: Tensor
    ) -> Blocks | None:
        """The blocks of a pass that says what it reads; None for all.

        Args:
            layer, query, key: as in `choose`.
            indices: `[R, W]` int64, cache indices that it has written.
            reads: `[R, 1 or W, S]` bool.

        Cost: a host synchronisation more.
        """
        if not self._chooses(layer):
            return None
        n_blocks = -(-key.shape[2] // self.method.block)
        own = torch.zeros(len(key), n_blocks, dtype=torch.bool, device=key.device)
        own.scatter_(1, (indices // self.method.block).clamp(max=n_blocks - 1), True)
        written = (
            own.to(torch.uint8).topk(int(own.sum(1).max()), 1).indices
        )  # and some that are not
        return self._choose(layer, query, key, written=written, is_real=reads.any(1), own=own)

    def _chooses(self, layer: int) -> bool:
        return layer >= self.method.first_layer and self.method.budget < 1

    def _choose(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        *,
        written: Tensor,
        is_real: Tensor,
        own: Tensor,
    ) -> Blocks | None:
        """The blocks of a pass.

        Args:
            layer, query, key: as in `choose`.
            written: `[R, n]` int64, blocks that the pass may have written in.
            is_real: `[R, S]` bool, what holds something.
            own: `[R, N]` bool, the blocks of the pass itself.
        """
        method = self.method
        summaries = self._follow(layer, key, written, is_real)
        n_blocks = summaries.shape[2]
        surplus = n_blocks * method.block - is_real.shape[1]
        holds = torch.nn.functional.pad(is_real, (0, surplus)).unflatten(1, (n_blocks, -1)).any(2)
        scores = method.score(query.unflatten(1, (key.shape[1], -1)).flatten(2, 3), summaries)
        scores = scores.masked_fill(~holds[:, None], float("-inf"))

        # the first block, and those of the pass itself that are not padding alone
        is_first = torch.arange(n_blocks, device=key.device) == 0
        is_kept = (own & holds) | is_first
        chosen = method.select(scores, is_kept[:, None], holds.sum(1))
        count = chosen.sum(-1)
        most = int(count.max())
        if most == n_blocks:
            return None
        index = chosen.to(torch.uint8).topk(most, -1).indices  # those that are chosen come first
        return Blocks(index.int(), count.int(), method.block)

    def _follow(self, layer: int, key: Tensor, written: Tensor, is_real: Tensor) -> Tensor:
        """Summaries `[R, H, N, C]` of what a layer holds after the pass has written."""
        method = self.method
        capacity = key.shape[2]
        size = method.block
        n_blocks = -(-capacity // size)
        known = self._summaries.get(layer)
        is_new = known is None or len(known) != len(key)
        blocks = torch.arange(n_blocks, device=key.device).expand(len(key), -1)
        blocks = blocks if is_new else written
        at = blocks[..., None] * size + torch.arange(size, device=key.device)  # [R, n, P]
        row = torch.arange(len(key), device=key.device)[:, None, None]
        index = at.clamp(max=capacity - 1)
        found = key.transpose(1, 2)[row, index]  # [R, n, P, H, D]
        holds = is_real[row, index] & (at < capacity)
        made = method.summarise(found.permute(0, 3, 1, 2, 4), holds[:, None, ..., None])
        if is_new:
            known = made.new_zeros(*made.shape[:2], n_blocks + 1, made.shape[3])
        assert known is not None
        if known.shape[2] <= n_blocks:  # the cache has grown
            grown = known.new_zeros(*known.shape[:2], n_blocks + 1, known.shape[3])
            grown[:, :, : known.shape[2] - 1] = known[:, :, :-1]
            known = grown
        target = blocks.clamp(max=known.shape[2] - 1)[:, None, :, None].expand_as(made)
        known.scatter_(2, target, made)
        self._summaries[layer] = known
        return known[:, :, :n_blocks]
