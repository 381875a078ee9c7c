"""DySpec: the likeliest nodes, whatever tree they make.

Y. Xiong, R. Zhang, Y. Li, L. Zou, "DySpec: Faster Speculative Decoding with Dynamic Token Tree
Structure", 2024 (arXiv 2410.11744): a node adds to the tokens of a pass the chance that it is
accepted, which is close to the product of the drafter's probabilities on its path. The tree that
takes nodes in the order of these products has the most tokens a pass of all of its size.

Departures: a child is no sample, as with frozen noise one token of a slot is right: the estimate is
the drafter's chance of being this token. The chain of the window is in the tree in any case. Nodes
are added a generation at a time, all that are among the best N so far; no node behind another is
better than it, so that the N that are left are those of one by one, as long as none is more than
`depth` steps behind the chain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.checks import check_int
from mmaccel.samplers.drafting.contract import Drafter, DraftSource, Nodes, OpenRun
from mmaccel.samplers.trees.contract import TreeShape
from mmaccel.samplers.trees.growth import Growth

_NEVER = float("-inf")


@dataclass(frozen=True)
class DySpec(TreeShape):
    """The N likeliest nodes.

    Args:
        nodes: N.
        depth: the most nodes of a path, less than the window; the drafter is asked as often.
        ranks: of an entry's children that are looked at, the chain's draft among them.
    """

    nodes: int = 32
    depth: int = 8
    ranks: int = 6

    name = "dyspec"

    def __post_init__(self) -> None:
        check_int("DySpec.nodes", self.nodes, 1, 1024, hint="32 suits a window of 32")
        check_int("DySpec.depth", self.depth, 1, 1024, hint="8 suits a window of 32")
        check_int("DySpec.ranks", self.ranks, 2, 64, hint="6 suits most drafts")

    def can_grow(self, source: DraftSource) -> bool:
        """See `TreeShape.can_grow`."""
        return source.has_children

    def grow(self, run: OpenRun, drafter: Drafter, drafts: Tensor, noise: Tensor) -> Nodes | None:
        """See `TreeShape.grow`."""
        tree = Growth(run, drafter, drafts, noise)
        if tree.width == 1:
            return None
        # the chain: how likely each draft is, and its alternatives
        entries = tree.parents[:, 1:]
        found = tree.children(entries, self.ranks)
        if found is None:
            return None
        on_chain = _round(found.log_probs[..., 0]).cumsum(1)  # [B, W-1], of the drafts' paths
        values = torch.cat([torch.zeros_like(on_chain[:, :1]), on_chain[:, :-1]], 1)
        chances = self._add(tree, entries, values, found.tokens[..., 1:], found.log_probs[..., 1:])
        chances, is_new = self._prune(tree, chances, torch.ones_like(chances, dtype=torch.bool))

        for _ in range(self.depth - 1):
            entries = torch.arange(chances.shape[1], device=chances.device) + tree.width
            entries = entries.expand_as(chances)
            found = tree.children(entries, self.ranks)
            assert found is not None
            values = chances.masked_fill(~is_new, _NEVER)  # the others' children are there
            more = self._add(tree, entries, values, found.tokens, found.log_probs)
            n_old = chances.shape[1]
            is_new = torch.arange(n_old + more.shape[1], device=more.device) >= n_old
            chances = torch.cat([chances, more], 1)
            chances, is_new = self._prune(tree, chances, is_new.expand_as(chances))
        return tree.nodes(chances > _NEVER)

    def _add(
        self, tree: Growth, entries: Tensor, values: Tensor, tokens: Tensor, log_probs: Tensor
    ) -> Tensor:
        """Add all children of entries `[B, n]`; the logarithms of their chances, `[B, n k]`."""
        parents = entries[..., None].expand_as(tokens).flatten(1)
        tree.add(parents, tokens.flatten(1))
        return (values[..., None] + _round(log_probs)).flatten(1)

    def _prune(self, tree: Growth, chances: Tensor, is_new: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the likeliest nodes; at a tie the first, as nodes stand behind their parents."""
        best = chances.sort(dim=1, descending=True, stable=True).indices[:, : self.nodes]
        tree.keep(best + tree.width)
        return chances.gather(1, best), is_new.gather(1, best)


def _round(log_probs: Tensor) -> Tensor:
    """Multiples of 1/1024, whose sums are exact: what differs by rounding errors, which depend on
    the other rows of a batch, is equal.
    """
    return (log_probs * 1024).round() / 1024
