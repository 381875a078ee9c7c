"""From canvases to forward passes: which columns are computed, written and read.

*As rows*: every column of every canvas is computed; several canvases are further rows. *As
entries*: some columns of a row are computed; several canvases are further entries of the same row,
each of which attends to its own canvas and to what earlier passes wrote (`cache_plan.py`).

Some models have logits shifted by one: the token at position i is predicted from the state at
position i - 1 (J. Ye et al., "Dream 7B: Diffusion Large Language Models", 2025, arXiv 2508.15487).
The queries of their passes are the entries before the slots. Where the one before the first slot is
not computed otherwise, it is one more entry, which is not written, read or counted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmaccel.contracts import CanvasPass, Prompt


def seen_blocks(keys: Tensor, queries: Tensor, block: int) -> Tensor:
    """`[..., Q, K]` bool: positions `[..., K]` in no later block than `queries` `[..., Q]`."""
    return keys[..., None, :] // block <= queries[..., None] // block


class ColumnSets(NamedTuple):
    """Columns of a pass as entries, `[R, N]` bool each."""

    computed: Tensor
    written: Tensor  # of those computed: what goes to the column's own cache index
    visible: Tensor  # what may be attended to, written by this pass or an earlier one


class Columns:
    """Columns of a run: T of the prompt, right-aligned, then L slots; N in all.

    Cache index i < N belongs to column i. *Scratch* indices follow, for entries that are computed
    and not written for later passes. The last index takes padding.

    Args:
        prompt: R = G * B rows, branch-major.
        block: positions per block; an entry attends to no later block. None for no blocks.
        shift: 1 if the logits at a position are those of the next one, 0 if its own.
        copies: most canvases of a pass as entries.
        scratch: most columns of a canvas that such a pass computes without writing.
    """

    def __init__(
        self,
        prompt: Prompt,
        length: int,
        block: int | None,
        shift: int,
        copies: int = 1,
        scratch: int = 0,
    ) -> None:
        longest = prompt.tokens.shape[1]
        device = prompt.tokens.device
        self.branches = prompt.branches
        self.first = longest
        self.n = longest + length
        self._scratch, self.cache_size = scratch, self.n + copies * scratch + 1
        self.pad = longest - prompt.lengths
        self.index = torch.arange(self.n, device=device)
        self.positions = (self.index - self.pad[:, None]).clamp(min=0)  # [R, N]
        self.is_real = self.index >= self.pad[:, None]
        source = (self.index[:longest] - self.pad[:, None]).clamp(min=0)
        self._prompt = prompt.tokens.gather(1, source)  # [R, T]
        self._block, self.shift = block, shift

    def tokens(self, canvases: Tensor) -> Tensor:
        """Prompts followed by canvases `[K, B, L]`, `[G, K, B, N]`."""
        copies, batch, _ = canvases.shape
        shape = (self.branches, copies, batch, -1)
        prompts = self._prompt.view(self.branches, 1, batch, -1).expand(shape)
        return torch.cat([prompts, canvases.expand(self.branches, -1, -1, -1)], -1)

    def to_pass_rows(self, per_row: Tensor) -> Tensor:
        """`[B]` of the canvas to `[R]` of the pass."""
        return per_row.repeat(self.branches)

    def own_block(self, column: Tensor) -> tuple[Tensor, Tensor]:
        """First column of the model's block that a column `[R]` is in, and of the next block."""
        assert self._block is not None
        low = (column - self.pad) // self._block * self._block + self.pad
        return low, low + self._block

    def as_rows(self, canvases: Tensor, visible: Tensor, slots: Tensor) -> CanvasPass:
        """All columns of canvases `[K, B, L]` as G * K * B rows, for logits of `slots` `[B, Q]`."""
        copies = canvases.shape[0]
        tokens = self.tokens(canvases).flatten(0, 2)  # [G * K * B, N]
        reads = visible[:, None]  # [R, 1, N]
        if self._block is not None:
            reads = reads & seen_blocks(self.positions, self.positions, self._block)  # [R, N, N]
        return CanvasPass(
            tokens=tokens,
            positions=self._repeat(self.positions, copies),
            cache_indices=self.index.expand_as(tokens),
            reads=self._repeat(reads, copies),
            queries=(slots + self.first - self.shift).repeat(self.branches * copies, 1),
        )

    def _repeat(self, per_row: Tensor, copies: int) -> Tensor:
        """`[G * B, ...]` to `[G * K * B, ...]`."""
        if copies == 1:
            return per_row
        split = per_row.unflatten(0, (self.branches, 1, -1))
        return split.expand(-1, copies, *split.shape[2:]).flatten(0, 2)

    def as_entries(self, canvases: Tensor, sets: ColumnSets, slots: Tensor) -> CanvasPass:
        """Some columns of K canvases `[K, B, L]`, the same for all, in R rows; with K above 1
        nothing is written. Logits of `slots` `[B, Q]` not computed mean nothing. Cost: one host
        synchronisation.
        """
        copies = canvases.shape[0]
        rows = sets.computed.shape[0]
        asked = (slots + self.first).repeat(self.branches, 1)  # [R, Q], columns
        needed = sets.computed
        if self.shift:  # the entry before the first slot says what stands there
            first, before = asked[:, :1], asked[:, :1] - 1
            is_needed = needed.gather(1, first) | needed.gather(1, before)
            needed = needed.scatter(1, before, is_needed)
        count = int(needed.sum(1).max())
        columns = (~needed).int().argsort(dim=1, stable=True)[:, :count]  # [R, C]
        is_real = sets.computed.gather(1, columns)
        is_written = sets.written.gather(1, columns)
        is_scratch = is_real & ~is_written
        step = torch.arange(copies, device=columns.device)[:, None]  # [K, 1]
        rank = is_scratch.cumsum(1) - 1  # [R, C], number among the row's scratch entries
        scratch = self.n + step * self._scratch + rank[:, None]  # [R, K, C]
        kept_at = torch.where(is_written, columns, self.cache_size - 1)
        cache_indices = torch.where(is_scratch[:, None], scratch, kept_at[:, None])
        tokens = self.tokens(canvases).transpose(1, 2).flatten(0, 1)  # [R, K, N]
        tokens = tokens.gather(2, columns[:, None].expand(-1, copies, -1))
        reads = self._reads(sets, columns, is_scratch, scratch)  # [R, K, 1 or C, P]
        if copies > 1:
            reads = reads.expand(-1, -1, count, -1)
        order = (needed.cumsum(1) - 1).clamp(min=0)  # [R, N], entry of a column
        entry = order.gather(1, asked - self.shift)  # [R, Q]
        queries = entry[:, None] + step * count  # [R, K, Q]
        return CanvasPass(
            tokens=tokens.flatten(1),
            positions=self.positions.gather(1, columns).repeat(1, copies),
            cache_indices=cache_indices.flatten(1),
            reads=reads.flatten(1, 2),
            queries=queries.view(rows, -1),
        )

    def _reads(
        self, sets: ColumnSets, columns: Tensor, is_scratch: Tensor, scratch: Tensor
    ) -> Tensor:
        """Cache indices that the entries of each copy attend to, `[R, K, 1 or C, P]` bool."""
        rows, copies, _ = scratch.shape
        cached = sets.visible & (~sets.computed | sets.written)  # [R, N]
        scratch = torch.where(is_scratch[:, None], scratch, self.cache_size - 1)
        reads = cached.new_zeros(rows, copies, self.cache_size)
        reads.scatter_(2, scratch, True)
        reads[..., -1] = False
        reads[..., : self.n] = cached[:, None]
        if self._block is None:
            return reads[:, :, None]
        at = self.positions.new_zeros(rows, copies, self.cache_size)  # position at a cache index
        positions = self.positions.gather(1, columns)[:, None]  # [R, 1, C]
        at.scatter_(2, scratch, positions.expand(-1, copies, -1))
        at[..., : self.n] = self.positions[:, None]
        return reads[:, :, None] & seen_blocks(at, positions, self._block)

    def logits_as_rows(self, logits: Tensor, copies: int) -> Tensor:
        """Logits of entries `[R, K * Q, V]` as rows `[G * K * B, Q, V]`."""
        if copies == 1:
            return logits
        split = logits.unflatten(1, (copies, -1)).unflatten(0, (self.branches, -1))
        return split.transpose(1, 2).flatten(0, 2)
