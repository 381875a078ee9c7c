"""SpecExec: very many nodes, the drafter asked about the likeliest of them alone.

R. Svirschevski, A. May, Z. Chen, B. Chen, Z. Jia, M. Ryabinin, "SpecExec: Massively Parallel
Speculative Decoding for Interactive LLM Inference on Consumer Devices", 2024 (arXiv 2406.02532): a
best-first search for the likeliest paths that expands many nodes at once and asks about none again.

Departures: the chain of the window is in the tree in any case. With frozen noise no token of the
target is drawn afresh: the right child is the one that holds the token of its slot. Under
`Speculative` a token is drawn and looked up among the children, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmaccel.checks import within
from mmaccel.samplers.drafting.contract import Drafter, Nodes, OpenRun
from mmaccel.samplers.trees.contract import TreeShape
from mmaccel.samplers.trees.dyspec import grow_likeliest
from mmaccel.samplers.trees.growth import Growth


@dataclass(frozen=True)
class SpecExec(TreeShape):
    """The N likeliest nodes of those that a best-first search has met, which asks the drafter about
    many at once.

    Args:
        nodes: N.
        depth: the most nodes of a path, less than the window; the drafter is asked as often.
        expand: nodes whose children the drafter is asked for at a time.
        ranks: of an entry's children that are looked at, the chain's draft among them.

    Loses: beyond some hundred nodes: what is left to win lies behind tokens of small chance.
    Figures: `scenes`, window 64, 192 nodes: 8.2 tokens a pass.
    """

    nodes: int = within(512, 1, 16384, "512 suits an idle GPU")
    depth: int = within(16, 1, 1024, "16 suits a window of 64")
    expand: int = within(64, 1, 16384, "64 suits most drafts")
    ranks: int = within(6, 2, 64, "6 suits most drafts")

    name = "spec-exec"
    is_capturable = True

    def grow(self, run: OpenRun, drafter: Drafter, drafts: Tensor, noise: Tensor) -> Nodes | None:
        tree = Growth(run, drafter, drafts, noise)
        chances = grow_likeliest(tree, self.nodes, self.depth, self.ranks, expand=self.expand)
        return None if chances is None else tree.nodes(chances > float("-inf"))
