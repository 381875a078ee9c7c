"""TreeEntries: a pass over a tree; a path of D entries is followed in log2(D) doublings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.samplers.drafting.contract import Nodes, Paths


@dataclass(frozen=True)
class TreeEntries:
    """The E = W + N entries of a pass: W of the window, then N nodes."""

    tokens: Tensor  # [B, E] int64, what each entry holds; the window's first one is not read
    parents: Tensor  # [B, E] int64, as in `mmaccel.contracts.Pass`
    width: int  # W

    @classmethod
    def of(cls, drafts: Tensor, nodes: Nodes) -> TreeEntries:
        rows = len(drafts)
        width = drafts.shape[1] + 1
        first = torch.zeros_like(nodes.tokens[:, :1])
        chain = torch.arange(-1, width - 1, device=drafts.device).expand(rows, -1)
        tokens = torch.cat([first, drafts, nodes.tokens], 1)
        return cls(tokens, torch.cat([chain, nodes.parents], 1), width)

    def depths(self) -> Tensor:
        """`[B, E]` int64: how many slots after the window's first an entry predicts."""
        depths = (self.parents >= 0).long()
        for above in self._ancestors():
            depths = depths + depths.gather(1, above)
        return depths

    def paths(self) -> Paths:
        """What every entry follows. Entries that are as deep as the window have no children."""
        depths = self.depths()
        slot = torch.arange(self.width - 1, device=depths.device)
        is_own = slot == (depths - 1)[..., None]  # the slot whose draft an entry is
        tokens = torch.where(is_own, self.tokens[..., None], 0)  # [B, E, W-1]
        for above in self._ancestors():
            tokens = tokens + tokens.gather(1, above[..., None].expand_as(tokens))
        return Paths(tokens, depths.clamp(max=max(self.width - 2, 0)))

    def is_right(self, targets: Tensor) -> Tensor:
        """`[B, E]` bool: an entry and all it follows hold the `targets` `[B, E]` behind each."""
        right = targets.gather(1, self.parents.clamp(min=0)) == self.tokens
        right = right | (self.parents < 0)
        for above in self._ancestors():
            right = right & right.gather(1, above)
        return right

    def view(self, last: Tensor) -> Tensor:
        """The entries that stand for the window's slots, `[B, W]` int64: the path to entry `last`
        `[B]`, from there on the first child of each, and behind the last of these the chain.
        """
        depths = self.depths()
        ancestors = self._ancestors()
        # the leaf below: the first child's first child and so on
        leaf = self._first_children()
        for _ in ancestors:
            leaf = leaf.gather(1, leaf)
        end = leaf.gather(1, last[:, None])  # [B, 1]
        depth = depths.gather(1, end)
        # for each slot up to the leaf's, the entry that many steps above it
        slot = torch.arange(self.width, device=last.device)
        steps = (depth - slot).clamp(min=0)  # [B, W]
        path = end.expand_as(steps)
        for bit, above in enumerate(ancestors):
            path = torch.where((steps >> bit) % 2 == 1, above.gather(1, path), path)
        return torch.where(slot <= depth, path, slot)

    def _first_children(self) -> Tensor:
        """`[B, E]` int64: the first entry that follows each one; itself where none does."""
        n_entries = self.parents.shape[1]
        number = torch.arange(n_entries, device=self.parents.device).expand_as(self.parents)
        first = torch.full_like(self.parents, n_entries)
        first.scatter_reduce_(1, self.parents[:, 1:], number[:, 1:], "amin")
        return torch.where(first < n_entries, first, number)

    def _ancestors(self) -> list[Tensor]:
        """`[B, E]` int64 for 1, 2, 4, … steps: the entry above; the first one is above itself."""
        above = [self.parents.clamp(min=0)]
        while 2 ** len(above) < self.width:
            above.append(above[-1].gather(1, above[-1]))
        return above
