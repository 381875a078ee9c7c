"""SpecExec: very many nodes, the drafter asked about the likeliest of them alone.

R. Svirschevski, A. May, Z. Chen, B. Chen, Z. Jia, M. Ryabinin, "SpecExec: Massively Parallel
Speculative Decoding for Interactive LLM Inference on Consumer Devices", 2024 (arXiv 2406.02532): a
search for the likeliest paths, best first, that expands many nodes at once. What the drafter said
of a node is kept and never asked again, so that a large tree costs a few calls over
a bounded number of entries.

Departures: the chain of the window is in the tree in any case. With frozen noise no token of the
target is drawn afresh: the right child is the one that holds the token of its slot. Under
`Speculative` a token is drawn and looked up among the children, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.checks import within
from mmaccel.samplers.drafting.contract import Drafter, DraftSource, Nodes, OpenRun
from mmaccel.samplers.trees.contract import TreeShape
from mmaccel.samplers.trees.dyspec import add_children, fork_chain, keep_likeliest
from mmaccel.samplers.trees.growth import Growth

_NEVER = float("-inf")


@dataclass(frozen=True)
class SpecExec(TreeShape):
    """The N likeliest nodes of those that a search has met.

    Args:
        nodes: N.
        depth: the most nodes of a path, less than the window; the drafter is asked as often.
        expand: nodes whose children the drafter is asked for at a time.
        ranks: of an entry's children that are looked at, the chain's draft among them.
    """

    nodes: int = within(512, 1, 16384, "512 suits an idle GPU")
    depth: int = within(16, 1, 1024, "16 suits a window of 64")
    expand: int = within(64, 1, 16384, "64 suits most drafts")
    ranks: int = within(6, 2, 64, "6 suits most drafts")

    name = "spec-exec"
    is_capturable = True

    def can_grow(self, source: DraftSource) -> bool:
        """See `TreeShape.can_grow`."""
        return source.has_children

    def grow(self, run: OpenRun, drafter: Drafter, drafts: Tensor, noise: Tensor) -> Nodes | None:
        """See `TreeShape.grow`."""
        tree = Growth(run, drafter, drafts, noise)
        forks = fork_chain(tree, self.ranks)
        if forks is None:
            return None
        chances = add_children(tree, *forks)
        is_open = torch.ones_like(chances, dtype=torch.bool)
        chances, is_open = keep_likeliest(tree, chances, is_open, self.nodes)

        for _ in range(self.depth - 1):
            # the likeliest nodes that the drafter was not asked about
            n = min(self.expand, chances.shape[1])
            ranked = chances.masked_fill(~is_open, _NEVER)
            best = ranked.sort(dim=1, descending=True, stable=True).indices[:, :n]
            found = tree.children(best + tree.width, self.ranks)
            assert found is not None
            more = add_children(
                tree, best + tree.width, ranked.gather(1, best), found.tokens, found.log_probs
            )
            is_open = is_open.scatter(1, best, False)
            is_open = torch.cat([is_open, torch.ones_like(more, dtype=torch.bool)], 1)
            chances = torch.cat([chances, more], 1)
            chances, is_open = keep_likeliest(tree, chances, is_open, self.nodes)
        return tree.nodes(chances > _NEVER)
