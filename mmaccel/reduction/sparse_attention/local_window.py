"""LocalWindow: I. Beltagy, M. Peters, A. Cohan, "Longformer", 2020 (arXiv:2004.05150), section 3.1
(sliding windows); G. Xiao et al., ICLR 2024 (arXiv:2309.17453) (the first entries).

Departures: nothing is evicted, and whole blocks are read, so that a query sees what else is in
them. On a grid the prompt is read in any case, and neighbours are counted across the border of a
row: the first token of a row is near the last ones of the row above.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmaccel.checks import within
from mmaccel.reduction.sparse_attention.contract import AttentionMethod, LayerBlocks


@dataclass(frozen=True)
class LocalWindow(AttentionMethod):
    """Reads the first entries, and those near the queries.

    Args:
        window: entries before a query, itself included, that it reads; not on a grid.
        sinks: the first entries of a row, which are read in any case.
        columns: tokens of a row of the grid that is written after the prompt; 0: no grid.
        radius: rows and columns of the grid between a query and what it reads.

    Loses: what stands further away; on a grid whole blocks are read: take `block` below `radius`.
    """

    budget: float = field(default=1.0, init=False, repr=False)  # the window is the budget
    window: int = within(1024, 1, hint="1024 suits most models")
    sinks: int = within(4, hint="4 suits most models")
    columns: int = within(0, hint="0 reads the last entries")
    radius: int = within(4, 1, 256, hint="give rows and columns of the grid")

    @property
    def is_whole(self) -> bool:
        """How long a row gets is not known before."""
        return False

    def choose(self, blocks: LayerBlocks) -> Tensor:
        """The blocks with a near entry, alike for all heads: `[R, 1, N]` bool."""
        number = torch.arange(blocks.holds.shape[1], device=blocks.start.device)
        if not self.columns:
            oldest = (blocks.start - self.window + 1).clamp(min=0)[:, None]
            is_sink = number * blocks.size < self.sinks
            return (is_sink | (number >= oldest // blocks.size))[:, None]
        # how far before a query its neighbours stand, in rows above and in columns
        row = torch.arange(self.radius + 1, device=number.device) * self.columns
        column = torch.arange(-self.radius, self.radius + 1, device=number.device)
        reach = (row[:, None] + column).flatten()
        query = blocks.start[:, None] + torch.arange(blocks.width, device=number.device)
        near = (query[..., None] - reach).flatten(1)  # [R, W n]
        is_inside = (near >= 0) & (near < blocks.is_real.shape[1])
        index = near.clamp(0, blocks.is_real.shape[1] - 1) // blocks.size
        is_near = torch.zeros_like(blocks.holds, dtype=torch.int64)
        is_near.scatter_add_(1, index, is_inside.long())
        is_prompt = number * blocks.size < blocks.begins[:, None].clamp(min=self.sinks)
        return ((is_near > 0) | is_prompt)[:, None]

    def most(self, n_blocks: int, n_own: int) -> int:
        """Those of the first entries, of the window and of the pass; on a grid any."""
        if self.columns:
            return n_blocks
        n_sinks = -(-self.sinks // self.block)
        return min(n_sinks + (self.window - 1) // self.block + 1 + n_own, n_blocks)
