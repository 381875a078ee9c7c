"""From canvases to forward passes: which columns are computed, written and read.

Two shapes of a pass. *Whole*: every column of every canvas, several canvases as more rows.
*Chosen*: some columns of a row, several canvases as more entries of the same row, each of which
sees its own copies and what earlier passes left; see `mmaccel.samplers.canvas.cache_plan`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasPass
from mmaccel.contracts import Prompt


class Sets(NamedTuple):
    """Position sets of a pass over chosen columns, `[R, N]` bool each."""

    computed: Tensor
    written: Tensor  # of those computed: what goes to the column's own place
    seen: Tensor  # what may be looked at, fresh or kept


class Columns:
    """Columns of a run: T of the prompt, right-aligned, and L slots behind them.

    Args:
        prompt: R = G * B rows, branch-major.
        length: L.
        block: positions per block that an entry must not look beyond; None for none.
        copies: most canvases of a pass over chosen columns.
        scratch: most columns of a canvas that such a pass computes without writing.

    Attributes:
        n: N = T + L.
        cache_size: P, N and room for what is computed and not written, and one that is nobody's.
        first: T, the column of slot 0.
        pad: `[R]` int64, columns before a row's first token.
    """

    def __init__(
        self, prompt: Prompt, length: int, block: int | None, copies: int = 1, scratch: int = 0
    ) -> None:
        longest, device = prompt.tokens.shape[1], prompt.tokens.device
        self.branches, self.first, self.n = prompt.branches, longest, longest + length
        self._scratch, self.cache_size = scratch, self.n + copies * scratch + 1
        self.pad = longest - prompt.lengths
        self.index = torch.arange(self.n, device=device)
        self.positions = (self.index - self.pad[:, None]).clamp(min=0)  # [R, N]
        self.is_real = self.index >= self.pad[:, None]
        source = (self.index[:longest] - self.pad[:, None]).clamp(min=0)
        self._prompt = prompt.tokens.gather(1, source)  # [R, T]
        self._blocks = None if block is None else self.positions // block

    def tokens(self, canvases: Tensor) -> Tensor:
        """Canvases `[K, B, L]` behind their prompts, `[G, K, B, N]`."""
        copies, batch, _ = canvases.shape
        shape = (self.branches, copies, batch, -1)
        prompts = self._prompt.view(self.branches, 1, batch, -1).expand(shape)
        return torch.cat([prompts, canvases.expand(self.branches, -1, -1, -1)], -1)

    def rows(self, per_row: Tensor) -> Tensor:
        """`[B]` of the canvas to `[R]` of the pass."""
        return per_row.repeat(self.branches)

    def whole(self, canvases: Tensor, seen: Tensor, slots: Tensor) -> CanvasPass:
        """Everything of K canvases, as G * K * B rows.

        Args:
            canvases: `[K, B, L]` int64.
            seen: `[R, N]` bool.
            slots: `[B, Q]` int64, whose logits are wanted.
        """
        copies = canvases.shape[0]
        tokens = self.tokens(canvases).flatten(0, 2)  # [G * K * B, N]
        reads = seen[:, None]  # [R, 1, N]
        if self._blocks is not None:
            reads = reads & (self._blocks[:, None] <= self._blocks[..., None])  # [R, N, N]
        return CanvasPass(
            tokens,
            self._repeat(self.positions, copies),
            self.index.expand_as(tokens),
            self._repeat(reads, copies),
            (slots + self.first).repeat(self.branches * copies, 1),
        )

    def chosen(self, canvases: Tensor, sets: Sets, slots: Tensor) -> CanvasPass:
        """Some columns of K canvases, in R rows.

        Args:
            canvases: `[K, B, L]` int64; with K above 1 nothing is written.
            sets: the same for all K.
            slots: `[B, Q]` int64, whose logits are wanted; computed, where they mean anything.

        Cost: one host synchronisation, for the number of entries.
        """
        copies, rows = canvases.shape[0], sets.computed.shape[0]
        count = int(sets.computed.sum(1).max())
        columns = (~sets.computed).int().argsort(dim=1, stable=True)[:, :count]  # [R, C]
        is_real = sets.computed.gather(1, columns)
        is_own = sets.written.gather(1, columns)
        is_fresh = is_real & ~is_own
        step = torch.arange(copies, device=columns.device)[:, None]  # [K, 1]
        rank = is_fresh.cumsum(1) - 1  # [R, C]
        aside = self.n + step * self._scratch + rank[:, None]  # [R, K, C]
        own = torch.where(is_own, columns, self.cache_size - 1)
        places = torch.where(is_fresh[:, None], aside, own[:, None])
        tokens = self.tokens(canvases).transpose(1, 2).flatten(0, 1)  # [R, K, N]
        tokens = tokens.gather(2, columns[:, None].expand(-1, copies, -1))
        reads = self._reads(sets, columns, is_fresh, aside)  # [R, K, 1 or C, P]
        if copies > 1:
            reads = reads.expand(-1, -1, count, -1)
        order = (sets.computed.cumsum(1) - 1).clamp(min=0)  # [R, N], entry of a column
        entry = order.gather(1, (slots + self.first).repeat(self.branches, 1))  # [R, Q]
        queries = entry[:, None] + step * count  # [R, K, Q]
        return CanvasPass(
            tokens.flatten(1),
            self.positions.gather(1, columns).repeat(1, copies),
            places.flatten(1),
            reads.flatten(1, 2),
            queries.view(rows, -1),
        )

    def in_rows(self, logits: Tensor, copies: int) -> Tensor:
        """Logits of entries `[R, K * Q, V]` as rows `[G * K * B, Q, V]`."""
        if copies == 1:
            return logits
        split = logits.unflatten(1, (copies, -1)).unflatten(0, (self.branches, -1))
        return split.transpose(1, 2).flatten(0, 2)

    def _reads(self, sets: Sets, columns: Tensor, is_fresh: Tensor, aside: Tensor) -> Tensor:
        """Places that the entries of each copy look at, `[R, K, 1 or C, P]` bool."""
        rows, copies, count = aside.shape
        kept = sets.seen & (~sets.computed | sets.written)  # [R, N]
        aside = torch.where(is_fresh[:, None], aside, self.cache_size - 1)
        reads = kept.new_zeros(rows, copies, self.cache_size)
        reads.scatter_(2, aside, True)
        reads[..., -1] = False
        reads[..., : self.n] = kept[:, None]
        if self._blocks is None:
            return reads[:, :, None]
        blocks = self._blocks.new_zeros(rows, copies, self.cache_size)
        own = self._blocks.gather(1, columns)  # [R, C]
        blocks.scatter_(2, aside, own[:, None].expand(-1, copies, -1))
        blocks[..., : self.n] = self._blocks[:, None]
        return reads[:, :, None] & (blocks[:, :, None] <= own[:, None, :, None])

    def _repeat(self, per_row: Tensor, copies: int) -> Tensor:
        """`[G * B, ...]` to `[G * K * B, ...]`."""
        if copies == 1:
            return per_row
        split = per_row.unflatten(0, (self.branches, 1, -1))
        return split.expand(-1, copies, *split.shape[2:]).flatten(0, 2)
